"""Convert YAML files and `key=value` overrides to a checked configuration."""
