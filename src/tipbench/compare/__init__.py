"""Rank it: who leads, who cannot be told apart from the leader, why, and what it would take to know."""
