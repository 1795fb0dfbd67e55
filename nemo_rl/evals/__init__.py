"""Evaluate a model: its answers to a data set of problems, and the share of correct ones."""
