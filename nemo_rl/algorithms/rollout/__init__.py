"""Sample and validate with rollouts: sources of groups, batches, and the weight sync to the engines."""
