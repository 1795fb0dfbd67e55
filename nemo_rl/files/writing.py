"""Write files atomically, and write output that training does not depend on."""

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, content: str | bytes | Iterable[str]) -> None:
    """Replace a file's whole content.

    Args:
        path: the file; its folder exists.
        content: the bytes, the text, or the text's parts in order, which together may be larger than the memory.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        if isinstance(content, bytes):
            partial.write_bytes(content)
        else:
            with partial.open("w", encoding="utf-8") as file:
                file.writelines([content] if isinstance(content, str) else content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


logger = logging.getLogger(__name__)


class OptionalOutput:
    """Destination of output whose failures cause a single warning.

    Args:
        name: name of the destination in the warning.
        failures: errors that are raised if the destination cannot be written.
    """

    def __init__(self, name: str, failures: tuple[type[Exception], ...] = (OSError,)):
        self._name = name
        self._failures = failures
        self._has_warned = False

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run a block that writes to the destination. Its failure is not raised and does not prevent later attempts."""
        try:
            yield
        except self._failures as error:
            if not self._has_warned:
                self._has_warned = True  # before the warning, which the run's log writes to its own output
                logger.warning(
                    "%s cannot be written: %s. The run continues; this output is incomplete.", self._name, error
                )
