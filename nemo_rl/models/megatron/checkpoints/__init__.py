"""Checkpoints of the Megatron backend: weights and optimizer state in the format `torch_dist`, import and export."""

ITERATION = "iter_0000000"
"""Subfolder of a weights folder that holds the tensors."""
