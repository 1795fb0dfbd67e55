"""Parts of every run: the loop, steps, checkpoints, and the checks of a resumed run."""
