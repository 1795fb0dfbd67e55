"""Build Megatron Core models: families, layers and their specification, and the model of a rank."""
