"""Implement the Megatron Core training backend. Only this package imports megatron, and only ranks import it."""
