"""Define the sections: every key with its type, default, unit and description."""
