"""Tune Python's garbage collector."""

import gc

_OLDEST_THRESHOLD = 1000
"""Collections of the middle generation, one for about 7,000 new objects, between two of all objects; Python's: 10."""


def search_all_objects_rarely() -> None:
    """Search all objects a hundred times less often from now on: for a process that makes many objects which stay.

    Python searches all objects, including those of the imported libraries (0.3 s), each time that their number has
    grown by a quarter. Young objects are searched as often as before, so a cycle that is dropped soon is found soon;
    one that lasts longer is found after some seven million new objects at the latest.
    """
    youngest, young, old = gc.get_threshold()
    gc.set_threshold(youngest, young, max(old, _OLDEST_THRESHOLD))
