"""Find the pages that only lead to another page; in the site they are redirects.

Such a page starts with `MARK` and has one link. Invariant: the link's target is a page or a heading of one.
"""

import re
from pathlib import Path

MARK = "<!-- redirect -->"

_LINK = re.compile(r"\]\((?P<page>[\w./-]+)\.md(?P<anchor>#[\w-]+)?\)")


def find_redirects(root: Path) -> dict[str, str]:
    """Return the target of each page that leads to another one: page without suffix -> address relative to it.

    Args:
        root: folder of the repository.

    Raises:
        ValueError: a page has the mark and not exactly one link to a page.
    """
    found = {}
    for path in sorted((root / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if not text.startswith(MARK):
            continue
        links = list(_LINK.finditer(text))
        if len(links) != 1:
            raise ValueError(f"{path} starts with {MARK} and has {len(links)} links to pages; write exactly one.")
        page = path.relative_to(root).with_suffix("").as_posix()
        found[page] = f"{links[0]['page']}.html{links[0]['anchor'] or ''}"
    return found
