"""The workers of a `RayWorkerGroup`: build their processes, call them, collect results and logs."""
