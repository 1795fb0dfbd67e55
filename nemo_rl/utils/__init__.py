"""Helpers that all packages share: errors, device, logging, checkpoints, timers, seeds."""
