"""Sample and validate in runs that train on rollouts: sources, batches, and the sync of weights to the engines."""
