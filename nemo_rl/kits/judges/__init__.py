"""Models that reward answers: the ranks of a reward model, and language models at an HTTP endpoint."""
