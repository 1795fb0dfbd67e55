"""Checks of float8 formats."""
