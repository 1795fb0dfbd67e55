"""Provide the common parts of the training backends: interface, model inputs, adapters, and checks of meshes."""
