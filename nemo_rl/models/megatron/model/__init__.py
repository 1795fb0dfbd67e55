"""Megatron Core models: model families, layers and their specification, and the models that a rank holds."""
