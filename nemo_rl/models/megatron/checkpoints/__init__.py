"""Checkpoints of the Megatron backend: its own folders, `torch_dist` files, optimizer state."""
