"""Megatron Core as a training backend; imported in ranks only, but for `training_backend` and what that needs."""
