"""Engines of vLLM with float8 weights: what vLLM is told about them, and which models it can serve so."""
