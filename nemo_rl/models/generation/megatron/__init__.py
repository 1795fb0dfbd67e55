"""Sample from Megatron Core's models, with the same layers that Megatron Core trains."""
