"""Find the links that lead to a path, which a view of files needs as well as the path itself."""

import os
from collections.abc import Iterable
from pathlib import Path

_MAX_LINKS = 40
"""Links on the way to one path, as in the kernel."""


def with_links(paths: Iterable[str]) -> list[str]:
    """Return absolute paths with every symbolic link on the way to them, and what they lead to.

    A path below another one of the result is left out, and so is one that does not exist.
    """
    found: dict[str, None] = {}
    for path in paths:
        found |= dict.fromkeys(_steps(os.path.abspath(path)))
    folders = {path for path in found if os.path.isdir(path) and not os.path.islink(path)}
    return [path for path in found if not any(str(above) in folders for above in Path(path).parents)]


def _steps(path: str) -> list[str]:
    """Return the links on the way to a path, and the path without links; nothing if it does not exist."""
    links: list[str] = []
    while os.path.lexists(path) and len(links) < _MAX_LINKS:
        link = _first_link(path)
        if link is None:
            return [*links, path]
        links.append(link)
        target = os.path.join(os.path.dirname(link), os.readlink(link))
        path = os.path.normpath(target + path.removeprefix(link))
    return []


def _first_link(path: str) -> str | None:
    """Return the first part of a path that is a link."""
    parts = [*reversed(Path(path).parents), Path(path)]
    return next((str(part) for part in parts if part.is_symlink()), None)
