"""Environments beyond mathematics: tools, code, judges, games, and environments of other libraries."""
