"""LoRA in the DTensor backend: adapter modules, their files, their export."""
