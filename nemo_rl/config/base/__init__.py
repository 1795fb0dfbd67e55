"""What every section is made of: base class, interpolation, names of built-in things, paths."""
