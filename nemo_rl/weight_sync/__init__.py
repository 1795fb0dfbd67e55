"""Move named tensors from trainers to generators and verify them, without other parts of the library."""
