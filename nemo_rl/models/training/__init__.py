"""Share between the training backends: their interface, model inputs, adapters, and checks of meshes."""
