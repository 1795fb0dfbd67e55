"""Provide the common parts of all sections: base class, interpolation, names of built-in parts, paths."""
