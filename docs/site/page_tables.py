"""Read the tables of a page: pages of the navigation, or names of the API. It needs no Sphinx."""

import re
from collections.abc import Iterator

_SECTION = re.compile(r"^## (?P<caption>.+)\n(?P<body>(?:(?!^## ).*\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^\| \[[^\]]+\]\(([\w./-]+)\.md\)", re.MULTILINE)
_ROW = re.compile(r"^\|.+\|$", re.MULTILINE)
_LINK = re.compile(r"\]\(([\w./-]+)\.md[)#]")
_NAME = re.compile(r"^\| `(?P<name>nemo_rl(?:\.\w+)+)` \|", re.MULTILINE)


def sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the heading and the pages, without suffix, of each section that has a table of pages.

    Args:
        text: Markdown whose tables link to a page in the first column. If another column links to a page that no
            first column has, this page follows that of its row.
    """
    placed = set(_ENTRY.findall(text))
    for section in _SECTION.finditer(text):
        pages = []
        for row in _ROW.findall(section["body"]):
            entry = _ENTRY.match(row)
            further = [page for page in _LINK.findall(row) if page not in placed]
            placed.update(further)
            pages += [*(entry.groups() if entry else ()), *further]
        if pages:
            yield section["caption"], pages


def names(text: str) -> list[str]:
    """Return the dotted names in the first columns of a page's tables."""
    return _NAME.findall(text)
