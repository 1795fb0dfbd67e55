"""The master configurations, one class per algorithm: its sections and the rules between them."""
