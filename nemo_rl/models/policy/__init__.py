"""The policy: the model under training, its controller and its workers."""
