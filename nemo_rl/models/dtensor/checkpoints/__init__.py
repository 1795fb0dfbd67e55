"""Checkpoints of the DTensor backend: weights in Hugging Face files, and the state of the training."""
