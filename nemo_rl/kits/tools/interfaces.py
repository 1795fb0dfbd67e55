"""Parts of a tool: a class with state, the tools of one entry of the configuration, an open episode of them.

Invariant: whatever a tool does in a call becomes a `ToolOutput` of that call.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nemo_rl.kits.tools.schema import ToolSpec

type Fault = Literal["error", "timeout"]


class EpisodeTools:
    """Base of a class with state for each episode: each public method with type hints and a docstring is a tool.

    An object is constructed with the entry's `kwargs` when an episode begins, and closed when it ends. With
    `shared: true` all episodes use one object, whose methods must then be thread-safe.
    """

    def open(self, metadata: Any) -> None:
        """Begin an episode.

        Args:
            metadata: `extra_env_info` of the prompt; None for an object that all episodes share.
        """

    def close(self) -> None:
        """Release what the object holds."""


@dataclass(frozen=True)
class ToolOutput:
    """Result of one call."""

    text: str
    """Text that the model reads."""
    fault: Fault | None = None
    """None: the tool did its work; "error": it failed; "timeout": it gave no answer in time."""


class OpenTools(abc.ABC):
    """The tools of one entry in one episode."""

    @abc.abstractmethod
    async def call(self, name: str, arguments: dict[str, Any]) -> ToolOutput:
        """Make a call; never raise what the tool raises.

        Args:
            name: tool, one of the entry's `specs`.
            arguments: checked arguments.
        """

    async def close(self) -> None:  # noqa: B027  (optional hook)
        """Release what the episode holds."""


class ToolSource(abc.ABC):
    """The tools of one entry of `env.tools.tools`."""

    specs: Mapping[str, ToolSpec]
    """Tools by name."""

    @abc.abstractmethod
    async def open(self, metadata: Any) -> OpenTools:
        """Begin an episode.

        Args:
            metadata: `extra_env_info` of the prompt.

        Raises:
            Exception: whatever the tool's own code raises; the episode then fails.
        """

    async def shutdown(self) -> None:  # noqa: B027  (optional hook)
        """Release what all episodes share."""
