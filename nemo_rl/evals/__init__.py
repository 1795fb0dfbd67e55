"""Evaluate a model by its answers to a data set of problems, and by the share of correct answers."""
