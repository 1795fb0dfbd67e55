"""The Megatron Core training backend, the only package that imports megatron. Only processes of ranks import it."""
