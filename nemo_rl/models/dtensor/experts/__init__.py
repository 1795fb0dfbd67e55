"""Expert parallelism of the DTensor backend, and the balance of the experts' load."""
