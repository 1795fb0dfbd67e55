"""Define the public names of NeMo RL: their place here, and the features that are not built yet."""
