"""Hold many low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) of one frozen model.

`slots` puts modules in the places of linear layers, which compute with the adapter that is in use. `tensors` has the
two matrices of each layer, `training` their gradients and their optimizer, and `files` their folders. Trainers and
engines use the same modules. Invariant: the base never changes, and an adapter that is not in use has no effect.
"""
