"""Stream prompts and rows in batches, epoch after epoch, with a position that a checkpoint stores."""
