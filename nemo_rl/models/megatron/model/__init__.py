"""Megatron Core models: families, layers, their specification, the models of a rank, checks of what they express."""
