"""Weights between Hugging Face's files and Megatron Core's models, streamed in both directions."""
