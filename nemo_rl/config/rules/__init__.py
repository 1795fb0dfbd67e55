"""Check keys against each other with rules. Each rule yields one text per error."""
