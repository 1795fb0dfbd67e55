"""Rows of data files: reading, checking and converting them, and refusing bad ones."""
