"""Serving: policies that pick a tip for a user, learn from the reward, and log every decision."""
