"""Runs that learn from written data: the loop, and how a run is put together."""
