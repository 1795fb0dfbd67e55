"""Routers of mixtures of experts in Megatron Core: how they spread tokens, and the replay of recorded choices."""
