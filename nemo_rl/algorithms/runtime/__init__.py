"""What every run has, whatever it trains: command line, checks, folders, workers, steps, checkpoints, the end."""
