"""Rollouts in actors of their own, so that tokens do not pass through the driver."""
