"""Read and write checkpoints of the DTensor backend: weights in Hugging Face files, and the training state."""
