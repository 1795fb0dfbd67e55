"""Import the library of an adapter, or name the extra that installs it."""

import importlib
from types import ModuleType

from nemo_rl.utils.errors import ConfigError


def library(module: str, extra: str) -> ModuleType:
    """Import a library.

    Args:
        module: name under which Python imports the library.
        extra: the project's extra that installs the library.

    Raises:
        ConfigError: the library is not installed. The message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ConfigError(
            f"env.{module} needs the package {extra}, which is not installed. Install it with `uv sync --extra "
            f"{extra}` or `pip install nemo-rl[{extra}]`."
        ) from None
