"""Checks keys against each other with rules, each of which yields one text for each error it finds."""
