"""Parts that both training backends share: their interface, model inputs, adapters, checks of meshes."""
