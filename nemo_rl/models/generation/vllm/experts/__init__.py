"""The experts that vLLM's routers choose for each token, for `policy.router_replay`."""
