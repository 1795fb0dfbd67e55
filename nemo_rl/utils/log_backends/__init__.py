"""Send metrics to trackers; each tracker has one file, the only one that imports its library.

`utils.logger` chooses among them. Invariant: no tracker is imported before a configuration requests it, except the
console and the JSON lines, which need no extra library.
"""
