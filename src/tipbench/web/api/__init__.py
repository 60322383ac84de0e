"""The JSON half, one router for each noun."""
