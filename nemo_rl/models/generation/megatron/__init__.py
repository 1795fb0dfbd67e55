"""Sample from Megatron Core's models, with the layers that Megatron Core trains."""
