"""Checkpoints of the Megatron Core backend without a model, a GPU or megatron."""

ITERATION = "iter_0000000"
