"""Small shared ground: errors, device, logging, checkpoints, timers, seeds."""
