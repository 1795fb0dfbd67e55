"""Tensor parallelism of the DTensor backend: plans for layers, and their application."""
