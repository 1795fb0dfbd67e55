"""Public names of NeMo RL: where each is defined here, and which belong to features that are not built yet."""
