"""The Megatron Core training backend, the only package that imports megatron; only processes of ranks import it."""
