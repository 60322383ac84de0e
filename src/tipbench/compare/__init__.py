"""Leaderboards: ranking, ties with the leader, attribution of the spread, and the number of scenarios needed."""
