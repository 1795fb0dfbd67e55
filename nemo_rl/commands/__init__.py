"""Commands of `python -m nemo_rl`, and tools that a run itself does not need; nothing imports this package."""
