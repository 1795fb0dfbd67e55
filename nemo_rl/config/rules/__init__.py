"""Rules between keys, each stated once; a rule yields one text for each finding."""
