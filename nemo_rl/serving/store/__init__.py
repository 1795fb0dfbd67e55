"""Keep sessions, commands and checkpoints in files.

Invariant: what a client was told is in a file before. A file is either a whole one or one to which lines are added, of
which an unfinished last line does not count, so a process may be killed at any moment.
"""
