"""Send named tensors from trainers to engines and verify them, independently of the rest of the library."""
