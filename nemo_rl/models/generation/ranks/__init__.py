"""The worker processes of one engine: how they meet, and how the first one calls the others."""
