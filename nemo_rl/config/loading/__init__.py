"""Turns YAML files and `key=value` overrides into a checked configuration."""
