"""The built-in arithmetic data set: problems, and problems with worked answers."""
