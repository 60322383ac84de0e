"""Recording: results go to the journal first, then to MLflow; each cell is recorded once."""
