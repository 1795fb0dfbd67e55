"""The parts of `tools/gpu_check.py`."""
