"""Make a loss that is defined in a user's own file usable in the workers.

Classes are pickled as "module and name", so a worker has to import the module. It can import installed packages, but
not a file next to a script on another node. Invariant: code outside installed packages is pickled with the loss, all
other code by name.
"""

import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from ray import cloudpickle

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_INSTALLED = tuple(Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib"))


def make_portable(loss_fn: Any) -> None:
    """Register the modules that define `loss_fn`, its class and its base classes to be pickled by value."""
    definers = [loss_fn, *type(loss_fn).__mro__]
    names = {getattr(definer, "__module__", None) for definer in definers}
    for name in names:
        module = sys.modules.get(name) if name is not None else None
        if module is not None and _is_users_own(module):
            cloudpickle.register_pickle_by_value(module)


def _is_users_own(module: ModuleType) -> bool:
    """Return whether a worker may not find the module."""
    file = getattr(module, "__file__", None)
    if module.__name__ == "__main__" or file is None:
        return False
    path = Path(file).resolve()
    return not any(path.is_relative_to(root) for root in (_PACKAGE_ROOT, *_INSTALLED))
