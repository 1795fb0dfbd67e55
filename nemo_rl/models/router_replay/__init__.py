"""Replay the experts that the engines chose for each token when the trainer computes it (`policy.router_replay`)."""
