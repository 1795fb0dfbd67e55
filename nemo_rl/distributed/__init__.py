"""Batches, virtual clusters and groups of worker processes, on which the rest of the library builds."""
