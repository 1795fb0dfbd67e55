"""Load Hugging Face models, read and write their files, and build small models of their architectures."""
