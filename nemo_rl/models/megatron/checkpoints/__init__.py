"""Write and read checkpoints of the Megatron backend in the format `torch_dist`, and import and export models."""

ITERATION = "iter_0000000"
"""Subfolder of a weights folder with the tensors."""
