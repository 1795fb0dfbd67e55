"""Megatron Core as a training backend; the only package that imports megatron."""
