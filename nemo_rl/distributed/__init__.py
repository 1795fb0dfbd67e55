"""The ground everything stands on: batches that travel, clusters, groups of worker processes."""
