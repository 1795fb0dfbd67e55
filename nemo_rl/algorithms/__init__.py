"""Algorithms: one loop for all of them, and what makes a run of each."""
