"""Speed-ups of vLLM's engine on the CPU; imported by processes that run the engine only."""
