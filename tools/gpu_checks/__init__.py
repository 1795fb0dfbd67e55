"""Implement the checks of `tools/gpu_check.py`."""
