"""How often Python looks for garbage among all objects of this process."""

import gc

_RARELY = 1000
"""Searches among young objects, each after some 7,000 new ones, between two among all; Python's own number is 10."""


def search_all_objects_rarely() -> None:
    """From now on, a hundred times less often: for a process that makes many objects which stay.

    Python looks at all objects, those of the imported libraries first (0.3 s), each time that their number has grown by
    a quarter. Young objects are searched as ever, so a cycle that is made and dropped soon is found soon; one that has
    lived longer is found after some seven million new objects at the latest.
    """
    youngest, young, old = gc.get_threshold()
    gc.set_threshold(youngest, young, max(old, _RARELY))
