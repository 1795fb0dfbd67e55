"""Rules on what changes the training reward of an answer besides its environment."""
