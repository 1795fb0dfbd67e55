"""Moves named tensors from trainers to generators, verified; knows nothing else."""
