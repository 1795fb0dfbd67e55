"""Provide batches, virtual clusters and groups of worker processes to the rest of the library."""
