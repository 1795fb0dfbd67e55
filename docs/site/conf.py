"""The site of the documentation: the repository's Markdown pages, read where they are, and the API from docstrings.

    uv run --extra cpu --group docs sphinx-build -W --keep-going -c docs/site . build/docs

The pages are plain Markdown, so they can also be read on the web page of a repository. The modules next to this file
add what only the site needs: navigation, redirects, descriptions of the API, styles. Invariant: the pages need no
network.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from redirects import find_redirects, moved_pages  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]

project = "nemo_rl"
author = "the contributors of nemo_rl"
copyright = author

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_reredirects",
    "api_pages",
    "navigation",
    "styles",
]

# The source folder is the repository, so that links between its README and docs/ work in the site too.
root_doc = "README"
include_patterns = ["*.md", "docs/**.md"]
redirects = moved_pages() | find_redirects(ROOT)
exclude_patterns = [
    *(entry.name for entry in ROOT.iterdir() if entry.is_dir() and entry.name != "docs"),
    *(f"{page}.md" for page in redirects),
]
redirects["index"] = "README.html"

nitpicky = True
# Signatures name types that no page describes: those of other libraries, and private ones of this library.
nitpick_ignore_regex = [("py:.*", r"(?s).*")]

myst_heading_anchors = 4
myst_links_external_new_tab = True

default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
# A section "Attributes" of a docstring describes fields that autodoc lists too.
napoleon_use_ivar = True

html_theme = "furo"
html_title = "nemo_rl"
html_show_sphinx = False
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
