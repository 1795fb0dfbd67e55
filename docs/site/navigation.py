"""The navigation of the site: the tables of docs/README.md.

A heading of that page becomes a caption, and each page that the table below it links to becomes an entry. So a new page
needs a row there and nothing else. A README.md in another folder lists the pages of its folder in the same way, and so
does a page next to a folder of the same name.
"""

from pathlib import Path, PurePosixPath

from page_tables import sections
from sphinx.application import Sphinx

INDEX = PurePosixPath("docs/README.md")
"""Page whose tables are the navigation of the whole site."""

PROJECT = ["docs/README", "CONTRIBUTING", "CHANGELOG"]
"""Pages at the end of the navigation."""


def toctree(caption: str, pages: list[str]) -> str:
    """Return the directive of a navigation entry that the page itself does not show."""
    lines = ["", "```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), "", *pages, "```", ""]
    return "\n".join(lines)


def add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append the navigation to the root page, and to an index of a folder the entries below it."""
    page = PurePosixPath(docname)
    if docname == app.config.root_doc:
        index = (Path(app.srcdir) / INDEX).read_text(encoding="utf-8")
        for caption, pages in sections(index):
            source[0] += toctree(caption, [f"/{INDEX.parent / each}" for each in pages])
        source[0] += toctree("Project", [f"/{each}" for each in PROJECT])
    elif page != INDEX.with_suffix("") and (page.name == INDEX.stem or (Path(app.srcdir) / page).is_dir()):
        source[0] += toctree("", [each for _, pages in sections(source[0]) for each in pages])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("source-read", add_navigation)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
