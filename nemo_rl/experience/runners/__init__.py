"""Sample rollouts in separate actors, so that tokens do not pass through the driver."""
