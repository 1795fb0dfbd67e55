"""Write files atomically.

Invariant: the file has its old content or all of the new one; a failure leaves no partial file.
"""

import os
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: Path, content: str | Iterable[str]) -> None:
    """Replace a file's whole content.

    Args:
        path: the file; its folder exists.
        content: the text, or its parts in order, which need not fit into memory together.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines([content] if isinstance(content, str) else content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
