"""Check the built site of the documentation: links, anchors, redirects, and that no page needs a network.

    python tools/check_site.py build/docs

Every relative link leads to a file of the site and to an anchor in it, every page is reached from index.html, and
scripts, styles and images are files of the site. The exit status is 1 if anything is found.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
_REDIRECT = re.compile(r'http-equiv="refresh" content="0; url=([^"]+)"')
_GENERATED = {"genindex.html", "search.html", "py-modindex.html"}
"""Pages of Sphinx itself, with places that scripts fill."""


class _Page(HTMLParser):
    """Links, loaded files and anchors of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)
        self.redirects = [unquote(target) for target in _REDIRECT.findall(text)]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record what a tag names."""
        given = dict(attrs)
        if anchor := given.get("id") or (given.get("name") if tag == "a" else None):
            self.anchors.add(anchor)
        if tag == "a" and (target := given.get("href")):
            self.links.append(target)
        if tag in _LOADED and (target := given.get(_LOADED[tag])):
            self.loaded.append(target)


@dataclass
class Site:
    """The pages under a folder.

    Attributes:
        folder: the site.
    """

    folder: Path
    _read: dict[Path, _Page] = field(default_factory=dict)

    @cached_property
    def pages(self) -> list[Path]:
        """All pages, also those of redirects."""
        return sorted(path.resolve() for path in self.folder.rglob("*.html") if "_static" not in path.parts)

    def page(self, path: Path) -> _Page:
        """Return what a page has."""
        if path not in self._read:
            self._read[path] = _Page(path.read_text(encoding="utf-8"))
        return self._read[path]

    def findings(self) -> Iterator[str]:
        """Yield a sentence for each mistake."""
        for path in self.pages:
            name = path.relative_to(self.folder.resolve())
            page = self.page(path)
            yield from (f"{name} loads {each} from a network." for each in page.loaded if _is_remote(each))
            for target in [*page.links, *page.loaded, *page.redirects]:
                if not urlsplit(target).scheme and not target.startswith("//") and (wrong := self._wrong(path, target)):
                    yield f"{name} links {target}, {wrong}."
        unreached = set(self.pages) - self._reached() - {page for page in self.pages if self.page(page).redirects}
        yield from (
            f"{page.relative_to(self.folder.resolve())} is not reached from index.html."
            for page in sorted(unreached)
            if page.name not in _GENERATED
        )

    def _wrong(self, path: Path, target: str) -> str:
        """Return what is wrong with a relative link; "" if nothing is."""
        parts = urlsplit(target)
        goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not goal.is_file():
            return "which is no file of the site"
        is_page = goal.suffix == ".html" and goal.name not in _GENERATED
        if parts.fragment and is_page and unquote(parts.fragment) not in self.page(goal).anchors:
            return "whose anchor does not exist"
        return ""

    def _reached(self) -> set[Path]:
        """Return the pages that links and redirects from index.html lead to."""
        ahead, reached = [(self.folder / "index.html").resolve()], set[Path]()
        while ahead:
            path = ahead.pop()
            if path in reached or not path.is_file():
                continue
            reached.add(path)
            targets = (urlsplit(target) for target in [*self.page(path).links, *self.page(path).redirects])
            goals = ((path.parent / unquote(each.path)).resolve() for each in targets if not each.scheme and each.path)
            ahead += [goal for goal in goals if goal.suffix == ".html"]
        return reached


def _is_remote(target: str) -> bool:
    return target.startswith("//") or urlsplit(target).scheme in ("http", "https")


def main() -> int:
    """Check the site; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the built site")
    site = Site(parser.parse_args().folder)
    if not site.pages:
        print(f"{site.folder} has no pages. Build the site first.", file=sys.stderr)
        return 1
    found = list(site.findings())
    print("\n".join(found) if found else f"{len(site.pages)} pages: every link leads somewhere.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
