"""Build and call the processes of a `RayWorkerGroup`'s workers, and collect their results and logs."""
