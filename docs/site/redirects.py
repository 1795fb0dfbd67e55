"""Find the addresses that only lead to another page; in the site they are redirects.

A file of such an address starts with `MARK` and has one link; it exists where NVIDIA NeMo RL has a page. Pages of this
project that have moved leave no file there, so that a folder lists what it has: their old addresses are in `MOVED`.
Invariant: the target is a page or a heading of one.
"""

import posixpath
import re
from pathlib import Path

MARK = "<!-- redirect -->"

MOVED = {
    "docs/guides": {
        "docs/start": "coming-from-nemo-rl doctor examples faq first-steps install notebook recipes troubleshooting",
        "docs/algorithms": "chain deepscaler distillation lora overlap reward-shaping",
        "docs/environments": "agents code games judges multi-turn nemo-gym several-environments tools",
        "docs/operations": "monitoring replay report",
        "docs/machines": "cluster environments-per-worker kubernetes megatron sizing slurm",
    },
    "docs/design-docs": {
        "docs/development": "adding-things agents architecture configuration gpu-readiness megatron-backend "
        "one-training-step optimizations private-apis rollout-runners weight-sync",
    },
}
"""Old folder -> new folder -> pages that have moved between them."""

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


def moved_pages() -> dict[str, str]:
    """Return the targets of the old addresses in `MOVED`: page without suffix -> address relative to it."""
    return {
        f"{old}/{page}": f"{posixpath.relpath(new, old)}/{page}.html"
        for old, folders in MOVED.items()
        for new, pages in folders.items()
        for page in pages.split()
    }
