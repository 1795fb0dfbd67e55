"""Hugging Face models: loading them, and making tiny ones."""
