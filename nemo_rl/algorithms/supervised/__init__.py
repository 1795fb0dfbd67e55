"""Sets up runs that train on written data: batches, validation, and the start of a run."""
