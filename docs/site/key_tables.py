"""Mark the tables of keys, so that `static/site.css` can give the column *meaning* its room."""

from docutils import nodes
from sphinx.application import Sphinx

COLUMNS = ["key", "type", "default", "meaning"]


def mark_tables(app: Sphinx, doctree: nodes.document) -> None:
    """Give each table with these columns the class `keys`."""
    for table in doctree.findall(nodes.table):
        head = next(table.findall(nodes.thead), None)
        if head is not None and [entry.astext() for entry in head.findall(nodes.entry)] == COLUMNS:
            table["classes"].append("keys")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("doctree-read", mark_tables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
