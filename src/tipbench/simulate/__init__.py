"""Simulation of users, off-policy evaluation and the promotion gate: which policy may serve."""
