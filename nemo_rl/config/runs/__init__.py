"""The whole configuration of a run, one class per algorithm: its sections and the rules that hold between them."""
