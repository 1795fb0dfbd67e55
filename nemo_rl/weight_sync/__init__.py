"""Move named tensors from trainers to generators and verify them, independently of the rest of the library."""
