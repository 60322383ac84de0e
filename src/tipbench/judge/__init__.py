"""Score it: blind sheets against the pinned rubric, and how far each judge can be trusted."""
