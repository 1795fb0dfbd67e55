"""PyTorch-native training of Hugging Face models: sharding, attention, optimizer, checkpoints."""
