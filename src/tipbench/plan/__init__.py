"""Planning: suites, scenarios, prompts, the rubric, and the grid of cells. No network, clock or randomness."""
