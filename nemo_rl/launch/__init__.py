"""Command line of a run, the checks before it starts, and its dry run, on top of all algorithms and evaluation."""
