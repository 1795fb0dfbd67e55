"""Evaluation: a model's answers to a data set of problems, and what share of them is right."""
