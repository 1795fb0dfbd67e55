"""Train Hugging Face models with PyTorch: sharding, attention, optimizer, checkpoints."""
