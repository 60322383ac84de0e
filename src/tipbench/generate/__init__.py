"""Generation: engines, one model's weights in memory at a time, and parsing answers into tips."""
