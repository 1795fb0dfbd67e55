"""LoRA in the Megatron backend: adapter modules and their files."""
