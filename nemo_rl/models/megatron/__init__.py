"""Megatron Core as a training backend; the only place that imports megatron."""
