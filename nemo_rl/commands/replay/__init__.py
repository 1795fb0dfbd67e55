"""`nemo_rl replay` repeats a recorded training step, and names the first part that differs from the run."""
