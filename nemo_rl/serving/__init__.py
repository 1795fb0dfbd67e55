"""Serve training: programs send batches and updates over HTTP, and every program trains an adapter of its own."""
