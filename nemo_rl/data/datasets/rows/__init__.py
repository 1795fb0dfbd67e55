"""Read, check and convert the rows of data files, and refuse bad ones."""
