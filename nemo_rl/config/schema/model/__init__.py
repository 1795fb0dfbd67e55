"""Define the sections of a model: policy, parallelism, generation, Megatron."""
