"""Checks keys against each other; a rule yields one text for each error it finds."""
