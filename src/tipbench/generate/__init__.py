"""Ask it: engines behind one port, one model's weights in memory at a time, answers parsed into tips."""
