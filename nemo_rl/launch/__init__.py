"""Command line of a run, the checks before it starts, and its dry run; above all algorithms and evaluation."""
