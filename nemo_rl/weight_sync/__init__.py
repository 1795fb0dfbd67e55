"""Move named tensors from trainers to generators and verify them; knows no trainer and no engine."""
