"""Whether every division of a model over ranks gives the numbers of one process: `tools/parity_table.py` runs it."""
