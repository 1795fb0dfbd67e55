"""Checkpoints of the DTensor backend: weights in Hugging Face files, state of training."""
