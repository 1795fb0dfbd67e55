"""Rollouts of a policy in environments, and the trajectories that they produce."""
