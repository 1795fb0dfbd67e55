"""Load Hugging Face models, read and write their files, and make small models of their architectures."""
