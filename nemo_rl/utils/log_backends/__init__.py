"""Send metrics to trackers, each with one file that alone imports its library.

`utils.logger` chooses among them. Invariant: no tracker is imported before a configuration requests it, except the
console and the JSON lines, which need no extra library.
"""
