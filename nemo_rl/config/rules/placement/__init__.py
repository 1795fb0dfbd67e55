"""Models of a run and their devices: roles, shared and own devices, ranks of every model."""
