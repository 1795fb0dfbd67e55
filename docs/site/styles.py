"""Mark what `static/site.css` treats in its own way: tables of keys, and diagrams, whose lines must not break."""

import re

from docutils import nodes
from sphinx.application import Sphinx

COLUMNS = ["key", "type", "default", "meaning"]
_DRAWN = re.compile(r"[\u2500-\u257f\u25b2-\u25c4]")
"""Lines, corners and arrow heads of diagrams."""


def mark(app: Sphinx, doctree: nodes.document) -> None:
    """Give each table with these columns the class `keys`, and each diagram the class `diagram`."""
    for block in doctree.findall(nodes.literal_block):
        if _DRAWN.search(block.astext()):
            block["classes"].append("diagram")
    for table in doctree.findall(nodes.table):
        head = next(table.findall(nodes.thead), None)
        if head is not None and [entry.astext() for entry in head.findall(nodes.entry)] == COLUMNS:
            table["classes"].append("keys")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("doctree-read", mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
