"""Operations of the trainer for vLLM's models on CPUs, so that log-probabilities have the trainer's bits."""
