"""Hugging Face models as an engine: no extra dependency, for debugging and unsupported architectures."""
