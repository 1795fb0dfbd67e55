"""Define the master configurations, one class per algorithm with its sections and the rules between them."""
