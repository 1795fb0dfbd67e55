"""Sample rollouts of a policy in environments, as trajectories."""
