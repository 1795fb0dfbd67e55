"""Import what a dotted path names: an optimizer, an environment, a data set, a worker.

Invariant: a path that leads nowhere is an error of the caller's kind that quotes the path and says why.
"""

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def importing() -> Iterator[None]:
    """For a block that imports much: no search for garbage meanwhile, a quarter of the time of torch and transformers.

    Modules stay; yet Python would look at all of their objects each time that there are a quarter more of them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_dotted(path: str, error: type[Exception], what: str, advice: str) -> Any:
    """The object `name` of `package.module.name`.

    Args:
        path: the dotted path.
        error: raised when there is no such thing.
        what: beginning of the error: where the path stands, and the path.
        advice: what to do instead, a sentence.
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
        raise error(f"{what} is a module, not something in one. Add the name of what is meant: {path}.<name>. {advice}")
    return found
