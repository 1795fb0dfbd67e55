"""Streams of prompts and rows: batches epoch after epoch, and the position that a checkpoint stores."""
