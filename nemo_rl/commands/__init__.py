"""Commands of `python -m nemo_rl` and tools that a run itself does not need, which no other package imports."""
