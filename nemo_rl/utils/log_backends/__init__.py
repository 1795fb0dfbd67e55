"""Where metrics go: one file per tracker, each importing its library alone.

`utils.logger` chooses among them. Invariant: nothing here is imported before a configuration asks for it, except the
console and the JSON lines, which need no library of their own.
"""
