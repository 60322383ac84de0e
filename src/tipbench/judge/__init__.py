"""Judging: blind sheets scored against the pinned rubric, and measurement of each judge's reliability."""
