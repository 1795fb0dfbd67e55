"""Divide layers into pipeline stages, through which each microbatch passes in order."""
