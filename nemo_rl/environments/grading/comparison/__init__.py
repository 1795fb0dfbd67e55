"""Rules that decide whether two final answers are equal, without torch and ray."""
