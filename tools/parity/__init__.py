"""Compare models divided over ranks with one process; run by `tools/parity_table.py`."""
