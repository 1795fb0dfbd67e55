"""Builds the processes of the workers of a `RayWorkerGroup`, calls them, and collects results and logs."""
