"""Shared helpers: errors, device, logging, checkpoints, timers, seeds."""
