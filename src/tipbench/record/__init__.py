"""Keep it: journal first, then MLflow; every cell once."""
