"""Stream prompts and rows in batches over epochs, with a position that a checkpoint stores."""
