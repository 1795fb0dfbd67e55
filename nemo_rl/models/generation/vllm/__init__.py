"""vLLM as an engine; the only folder that imports vllm."""
