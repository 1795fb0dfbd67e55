"""Send metrics to trackers. Each tracker has one file, and only this file imports the tracker's library.

`utils.logger` chooses the trackers. Invariant: no tracker is imported before a configuration requests it, except the
console and the JSON lines, which need no extra library.
"""
