"""Compute low-rank adapters (LoRA) in vLLM, whose matrices arrive in memory.

`check` says which models and sizes are possible, `products` computes the adapters of a batch on CPUs, and `held` gives
vLLM the adapters.
"""
