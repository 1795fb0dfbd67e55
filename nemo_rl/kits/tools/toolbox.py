"""Manage all tools of an environment, which are opened and closed with each episode.

The entries of `env.tools.tools` name the tools. Invariant: a name in a call leads to exactly one tool, and an episode
that cannot open all of its tools closes those that it has opened.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl.config.schema.data import ImagesConfig
from nemo_rl.config.schema.kits import ToolConfig, ToolEnvironmentConfig
from nemo_rl.kits.tools.found import find_tools
from nemo_rl.kits.tools.interfaces import OpenTools, ToolSource, ToolSpec
from nemo_rl.kits.tools.isolated import IsolatedTools
from nemo_rl.kits.tools.local import LocalTools
from nemo_rl.kits.tools.mcp import MCP, McpTools
from nemo_rl.kits.tools.outputs import OutputLimits
from nemo_rl.kits.tools.sandboxed import PYTHON, SandboxedPython
from nemo_rl.utils.errors import ConfigError


class Toolbox:
    """Tools of an environment.

    Args:
        sources: the tool sources, one for each entry.

    Raises:
        ConfigError: two tools have the same name.
    """

    def __init__(self, sources: Sequence[ToolSource]) -> None:
        self._sources = sources
        self._source_of: dict[str, int] = {}
        for number, source in enumerate(sources):
            for name in source.specs:
                if name in self._source_of:
                    raise ConfigError(f"env.tools.tools has two tools named {name!r}. Rename one of them.")
                self._source_of[name] = number

    @property
    def specs(self) -> dict[str, ToolSpec]:
        """Tools by name."""
        return {name: self._sources[number].specs[name] for name, number in self._source_of.items()}

    async def open(self, metadata: Any) -> "Episode":
        """Open the tools of one episode.

        Args:
            metadata: `extra_env_info` of the prompt.

        Raises:
            Exception: any error that a tool raises.
        """
        opened = await asyncio.gather(*(source.open(metadata) for source in self._sources), return_exceptions=True)
        failures = [each for each in opened if isinstance(each, BaseException)]
        episode = Episode([each for each in opened if isinstance(each, OpenTools)], self._source_of)
        if failures:
            await episode.close()
            raise failures[0]
        return episode

    async def shutdown(self) -> None:
        """Release the resources that all episodes share."""
        await asyncio.gather(*(source.shutdown() for source in self._sources), return_exceptions=True)


class Episode:
    """Open tools of one episode."""

    def __init__(self, opened: Sequence[OpenTools], source_of: Mapping[str, int]) -> None:
        self._opened = opened
        self._source_of = source_of

    def tools_of(self, name: str) -> OpenTools:
        """Return the open tools to which a tool's name belongs."""
        return self._opened[self._source_of[name]]

    async def close(self) -> None:
        """Close all tools."""
        await asyncio.gather(*(tools.close() for tools in self._opened), return_exceptions=True)


def make_toolbox(config: ToolEnvironmentConfig) -> Toolbox:
    """Find the tools of a section. Each MCP server is started once to request its tools.

    Raises:
        ConfigError: an entry cannot be used.
    """
    return Toolbox([_source(entry, f"env.tools.tools.{n}", config) for n, entry in enumerate(config.tools)])


def limits_of(config: ToolEnvironmentConfig) -> OutputLimits:
    """Return the limits on the outputs of a section's tools."""
    if not config.tokenizer.use_processor:
        return OutputLimits(config.max_output_bytes)
    return OutputLimits(config.max_output_bytes, int(image_limits(config).max_megabytes * 1e6))


def image_limits(config: ToolEnvironmentConfig) -> ImagesConfig:
    """Return the limits on images that tools of a section return. Keys that are null have the limits' own defaults."""
    given = {
        "allow_urls": config.images.allow_urls,
        "max_megapixels": config.images.max_megapixels,
        "max_megabytes": config.images.max_megabytes,
    }
    return ImagesConfig.build(**{name: value for name, value in given.items() if value is not None})


def _source(entry: ToolConfig, place: str, config: ToolEnvironmentConfig) -> ToolSource:
    timeout_s = entry.timeout_s or config.timeout_s
    if entry.name == MCP:
        if not entry.command:
            raise ConfigError(
                f"{place}.command is missing: name=mcp needs the program of the server and its arguments."
            )
        if entry.isolate:
            raise ConfigError(
                f"{place}.isolate=true: a server of MCP has a process of its own already. Remove the key."
            )
        variables = {name: str(value) for name, value in entry.kwargs.items()}
        return McpTools(entry.command, variables, shared=entry.shared, timeout_s=timeout_s, limits=limits_of(config))
    if entry.name == PYTHON:
        if entry.isolate or entry.shared:
            raise ConfigError(f"{place}: each program of name=python has a sandbox. Remove isolate and shared.")
        return SandboxedPython(entry.kwargs, f"{place}.kwargs", timeout_s, config.max_output_bytes)
    if entry.command:
        raise ConfigError(f"{place}.command belongs to name=mcp, not to name={entry.name}.")
    found = find_tools(entry.name, entry.kwargs, f"{place}.name={entry.name!r}")
    if not entry.isolate:
        return LocalTools(found, shared=entry.shared, timeout_s=timeout_s, limits=limits_of(config))
    if entry.shared:
        raise ConfigError(f"{place}: isolate=true gives each episode a process, so shared=true cannot be set with it.")
    return IsolatedTools(
        found,
        entry.name,
        timeout_s=timeout_s,
        limits=limits_of(config),
        memory_limit_mb=entry.memory_limit_mb,
    )
