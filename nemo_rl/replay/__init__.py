"""`nemo_rl replay`: repeat a recorded training step, and name the first number that differs from the run's."""
