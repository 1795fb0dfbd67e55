"""Checkpoints of the Megatron backend: its own folders, `torch_dist` files, optimizer state."""

ITERATION = "iter_0000000"
"""Subfolder of a weights folder that holds the tensors."""
