"""Sections of a model: policy, parallelism, generation, Megatron."""
