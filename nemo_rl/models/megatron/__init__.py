"""The Megatron Core training backend: the only place that imports megatron, and only in the processes of ranks."""
