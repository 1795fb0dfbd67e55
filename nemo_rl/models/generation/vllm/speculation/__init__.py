"""Speculative decoding with vLLM: its settings and checks, repairs of vLLM's CPU build, and its counts."""
