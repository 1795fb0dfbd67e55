"""`nemo_rl replay`: repeat a recorded training step, and name the first part that differs from the run."""
