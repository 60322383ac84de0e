"""What to ask: suites, scenarios, prompts, the rubric, and the grid of cells. Pure."""
