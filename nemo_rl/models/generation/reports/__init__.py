"""What engines report about their work, besides responses."""
