"""Describe the API: add the docstring of each name below the tables of a page in docs/reference/api.

Sphinx's autodoc imports the names, so a page describes what `from nemo_rl... import` returns, also for names that a
module imports only when they are used. On every page, a name in code that has a description becomes a link to it.
"""

import importlib
import inspect
import re
from collections.abc import Iterator

from docutils import nodes
from page_tables import names
from sphinx.application import Sphinx

FOLDER = "docs/reference/api/"

_PLACE = re.compile(r"nemo_rl/(?P<module>[\w/]+)\.py::(?P<name>\w+)")
"""A name by its file, as pages write it."""


def directive(name: str) -> Iterator[str]:
    """Yield the lines of the directive that describes a name.

    Raises:
        ImportError: the module does not exist.
        AttributeError: the module does not have the name.
    """
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
    yield f".. auto{kind}:: {name}"
    if kind == "class":
        yield from ("   :members:", "   :special-members: __call__")
    yield ""


def describe_names(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append the descriptions to a page of the API."""
    if docname.startswith(FOLDER) and (found := names(source[0])):
        lines = [
            "",
            "## Descriptions",
            "",
            "```{eval-rst}",
            *(line for name in found for line in directive(name)),
            "```",
        ]
        source[0] += "\n".join(lines) + "\n"


def link_names(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Make each name in code that has a description a link to it."""
    described = app.env.domains.python_domain.objects
    for literal in list(doctree.findall(nodes.literal)):
        text = literal.astext()
        if place := _PLACE.fullmatch(text):
            text = f"nemo_rl.{place['module'].replace('/', '.')}.{place['name']}"
        entry = described.get(text)
        if entry is None or isinstance(literal.parent, nodes.reference):
            continue
        address = f"{app.builder.get_relative_uri(docname, entry.docname)}#{entry.node_id}"
        literal.replace_self(nodes.reference("", "", literal.deepcopy(), internal=True, refuri=address))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("source-read", describe_names)
    app.connect("doctree-resolved", link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
