"""Play rollouts in actors, so that tokens do not pass through the driver."""
