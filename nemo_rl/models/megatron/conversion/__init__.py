"""Convert weights between Hugging Face files and Megatron Core models, in both directions."""
