"""Find the function or class that an entry of `env.tools.tools` names, and describe its tools.

Invariant: the module imports neither torch nor ray, because the process of an isolated tool imports it too.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl.kits.tools.interfaces import EpisodeTools, ToolSpec, spec_of
from nemo_rl.utils.errors import ConfigError, did_you_mean
from nemo_rl.utils.imports import import_dotted

_HERE = "nemo_rl.kits.tools"
BUILT_IN_TOOLS = {
    "calculator": f"{_HERE}.calculator.calculator",
    "retriever": f"{_HERE}.retriever.RetrieverTools",
}
"""Dotted path of the function or class of each built-in tool."""
OTHER_NAMES = ("python", "mcp")
"""Names of entries that mean other kinds of tools."""


@dataclass(frozen=True)
class FoundTools:
    """A function that is a tool, or a class of tools with its arguments."""

    found: Any
    """Function, or subclass of `EpisodeTools`."""
    kwargs: Mapping[str, Any]
    """Arguments of the class."""
    specs: Mapping[str, ToolSpec]
    """Specifications of the tools by name."""

    @property
    def has_state(self) -> bool:
        """True if the entry is a class, whose objects keep a state."""
        return inspect.isclass(self.found)

    def opened(self, metadata: Any) -> tuple[Mapping[str, Callable[..., Any]], Callable[[], None]]:
        """Begin an episode, and return the callables by tool name and a function that ends the episode."""
        if not self.has_state:
            return {self.found.__name__: self.found}, lambda: None
        tools = self.found(**self.kwargs)
        tools.open(metadata)
        return {name: getattr(tools, name) for name in self.specs}, tools.close


def find_tools(name: str, kwargs: Mapping[str, Any], what: str) -> FoundTools:
    """Import and describe the tools of an entry.

    Args:
        name: built-in name, or dotted path of a function or a subclass of `EpisodeTools`.
        kwargs: arguments of the class.
        what: the configuration key and its value, for messages.

    Raises:
        ConfigError: there is no such object, it is not a tool, or its arguments do not fit.
    """
    path = BUILT_IN_TOOLS.get(name, name)
    if "." not in path:
        raise ConfigError(f"{what} is unknown.{did_you_mean(name, [*BUILT_IN_TOOLS, *OTHER_NAMES])} {_advice()}")
    found = import_dotted(path, ConfigError, what, _advice())
    if inspect.isclass(found) and issubclass(found, EpisodeTools):
        _check_arguments(found, kwargs, what)
        methods = _public_methods(found)
        if not methods:
            raise ConfigError(f"{what} has no tools: each public method of the class is one.")
        return FoundTools(found, kwargs, {m.__name__: spec_of(_bound(m), f"{what}, {m.__name__}") for m in methods})
    if not inspect.isfunction(found):
        raise ConfigError(f"{what} is neither a function nor a class derived from EpisodeTools. {_advice()}")
    if kwargs:
        raise ConfigError(f"{what} is a function, which takes no kwargs; derive a class from EpisodeTools for them.")
    spec = spec_of(found, what)
    return FoundTools(found, {}, {spec.name: spec})


def _advice() -> str:
    names = ", ".join([*BUILT_IN_TOOLS, *OTHER_NAMES])
    return f"Choose one of {names}, or the dotted path of a function or of a class derived from EpisodeTools."


def _public_methods(cls: type[EpisodeTools]) -> list[Callable[..., Any]]:
    members = inspect.getmembers(cls, inspect.isfunction)
    return [method for name, method in members if not name.startswith("_") and name not in ("open", "close")]


def _bound(method: Callable[..., Any]) -> Callable[..., Any]:
    """Bind the method to an object, so that its signature has no `self`."""
    return method.__get__(object())


def _check_arguments(cls: type[EpisodeTools], kwargs: Mapping[str, Any], what: str) -> None:
    try:
        inspect.signature(cls).bind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"{what} cannot be constructed with kwargs={dict(kwargs)}: {error}.") from None
