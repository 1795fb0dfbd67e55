"""Compute the advantage of every token from the rewards of the samples."""
