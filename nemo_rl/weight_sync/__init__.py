"""Move named tensors from trainers to generators and verify them; depends on no other part of the library."""
