"""Implement the algorithms: one training loop that all of them share, and the parts that each algorithm adds to it."""
