"""Rules that decide whether two final answers are equal; nothing in this folder needs torch or ray."""
