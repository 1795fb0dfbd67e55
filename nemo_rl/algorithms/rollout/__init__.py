"""Runs that train on rollouts of the policy: sources, stages, and the sync of weights to the engines."""
