"""Import objects by dotted path: optimizers, environments, data sets, workers.

Invariant: a path that cannot be imported raises the caller's error class with the path and the reason.
"""

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def importing() -> Iterator[None]:
    """Switch Python's garbage collector off for a block that imports much, which saves a quarter of torch's time.

    The imported objects stay alive, but the collector would scan them all each time their number grew by a quarter.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_dotted(path: str, error: type[Exception], what: str, advice: str) -> Any:
    """Import the object `name` of `package.module.name`.

    Args:
        error: class of the error to raise if there is no such object.
        what: start of the error message: the source of the path, and the path.
        advice: last sentence of the message: what to do instead.
    """
    module, _, name = path.rpartition(".")
    if not all(part.isidentifier() for part in path.split(".")):
        raise error(f"{what} cannot be imported (not a dotted path, package.module.Name). {advice}")
    try:
        with importing():
            found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as reason:
        raise error(f"{what} cannot be imported ({reason}). {advice}") from reason
    if isinstance(found, ModuleType):
        raise error(f"{what} is a module, not an object in one. Add the object's name: {path}.<name>. {advice}")
    return found
