"""Where metrics go: one file per tracker, each importing its library alone."""
