"""Define the command line of a run, the checks before it starts, and its dry run, for all algorithms and evaluation."""
