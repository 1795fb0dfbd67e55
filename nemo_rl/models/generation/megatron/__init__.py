"""Megatron Core's models as an engine: what Megatron trains samples with the same layers."""
