"""The environment `tools`, which makes the calls of each response, and grades a response without a call.

    response ─► parser ─► calls ─► checked ─► made at the same time ─► messages of the role "tool" ─► next response
                   └─ no call ─► grader ─► reward, end of the episode

Invariant: a call affects only its own sample. A call that cannot be made is counted, and the model gets a message about
it. A reward always comes from the grader.
"""

import asyncio
import inspect
import logging
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import torch

from nemo_rl.config import TokenizerConfig
from nemo_rl.config.schema.kits import ToolEnvironmentConfig
from nemo_rl.data.images.image import load_image
from nemo_rl.data.messages.content import Content
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, EpisodeStart
from nemo_rl.kits.tools.grader import Grader, check_grader
from nemo_rl.kits.tools.template import choose_parser, looks_like_a_call, response_text
from nemo_rl.kits.tools.toolbox import Episode, image_limits, make_toolbox
from nemo_rl.kits.tools.vllm import ToolCall, text_of_answer
from nemo_rl.utils.errors import ConfigError, DataError

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import LLMMessageLogType, TokenizerType
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

logger = logging.getLogger(__name__)

COUNTS = (
    *("tool_calls", "invalid_tool_calls", "malformed_tool_calls", "unknown_tools", "wrong_arguments"),
    *("tool_errors", "tool_timeouts"),
)
"""Names of the counts of an episode. `invalid_tool_calls` is the sum of the three names after it."""


class ToolState(TypedDict):
    """Metadata of a sample between its turns."""

    episode: str
    """Key under which the environment's process keeps the open tools."""
    counts: dict[str, int]
    """Counts of the episode so far, by the names in `COUNTS`."""
    tool_s: float
    """Time in seconds that the episode has waited for tools."""
    row: Any
    """`extra_env_info` of the prompt, for the grader."""


@dataclass(frozen=True)
class CallResult:
    """Outcome of one call."""

    content: Content
    """Text or parts that the model reads."""
    name: str | None = None
    """Name of the called tool, or None if the call could not be read."""
    kind: str | None = None
    """Name in `COUNTS` under which the call is counted besides `tool_calls`, or None if the tool succeeded."""

    @property
    def is_invalid(self) -> bool:
        """True if the call could not be made."""
        return self.kind in ("malformed_tool_calls", "unknown_tools", "wrong_arguments")


class ToolEnvironment(EnvironmentInterface[ToolState]):
    """An environment that makes the calls of each turn, and grades a turn without a call.

    Args:
        cfg: the `env.tools` section (or its dict).

    Raises:
        ConfigError: a tool, the parser or the grader cannot be used.
    """

    reads_token_ids: ClassVar[bool] = True
    config_class: ClassVar[type | None] = ToolEnvironmentConfig

    def __init__(self, cfg: ToolEnvironmentConfig | Mapping[str, Any]) -> None:
        self.cfg = cfg if isinstance(cfg, ToolEnvironmentConfig) else ToolEnvironmentConfig.build(**cfg)
        _require_tokenizer(self.cfg)
        self._tokenizer = _tokenizer_of(self.cfg)
        self._toolbox = make_toolbox(self.cfg)
        self._specs = self._toolbox.specs
        schemas = [spec.schema for spec in self._specs.values()]
        self._parser, self._opening = choose_parser(self.cfg.tool_parser, self._tokenizer, schemas)
        self._grader = Grader(self.cfg.grader)
        self._threads = ThreadPoolExecutor(self._grader.concurrency, "grader")
        self._episodes: dict[str, Episode] = {}

    @classmethod
    def check_section(cls, section: Mapping[str, Any], place: str, tokenizer: "TokenizerType | None" = None) -> None:
        """Check the grader and the tokenizer. `offered_tools` checks the tools."""
        cfg = ToolEnvironmentConfig.of(section)
        _require_tokenizer(cfg)
        check_grader(cfg.grader, f"{place}.grader", tokenizer)
        if tokenizer is not None:
            _tokenizer_of(cfg)

    @classmethod
    def offered_tools(
        cls, section: ToolEnvironmentConfig, tokenizer: "TokenizerType", place: str
    ) -> list[dict[str, Any]]:
        """Return the offered tools, after a check that a parser fits the chat template."""
        try:
            specs = make_toolbox(section).specs
            schemas = [spec.schema for spec in specs.values()]
            parser = choose_parser(section.tool_parser, tokenizer, schemas)[0] if schemas else None
        except ConfigError as error:
            raise ConfigError(str(error) if place in str(error) else f"{place}: {error}") from error
        if parser is not None:
            logger.info("%s: tools %s; calls are read by vLLM's parser %s.", place, ", ".join(specs), parser.name)
        return schemas

    async def open_episode(  # type: ignore[override]  # may be a coroutine function
        self, metadata: Any
    ) -> EpisodeStart[ToolState]:
        """Open the tools of one episode, and the grader's episode."""
        key = uuid.uuid4().hex
        start = await self._graded(self._grader.open_episode, metadata)
        if start.error is None:
            self._episodes[key] = await self._toolbox.open(metadata)
        state = ToolState(episode=key, counts=dict.fromkeys(COUNTS, 0), tool_s=0.0, row=start.metadata)
        return EpisodeStart(state, start.observation, start.error)

    async def step(  # type: ignore[override]  # may be a coroutine function
        self, message_log_batch: list["LLMMessageLogType"], metadata: list[ToolState]
    ) -> EnvironmentReturn[ToolState]:
        """Make the calls of one response, or grade it if it has none.

        Args:
            message_log_batch: one conversation, whose last message has `token_ids`.
        """
        (log,), (state,) = message_log_batch, metadata
        text = response_text(log[-1]["token_ids"].tolist(), self._tokenizer)
        calls = self._parser.calls(text, {})
        if not calls and not looks_like_a_call(text_of_answer(text), self._opening, self._specs):
            return await self._final(log, state)
        episode = self._episodes.get(state["episode"])
        if episode is None:
            error = "the process of the environment `tools` died, and with it the tools of this episode"
            return _turn([], state, errors=[error])
        started = time.perf_counter()
        results = await self._made(calls, episode)
        state = _counted(state, results, time.perf_counter() - started)
        return _turn(results, state, is_invalid=any(result.is_invalid for result in results))

    async def close_episode(self, metadata: Any) -> None:  # type: ignore[override]  # may be a coroutine function
        """Close the tools of an episode, and the grader's episode."""
        if not isinstance(metadata, dict) or "episode" not in metadata:
            return  # the episode was not opened
        episode = self._episodes.pop(metadata["episode"], None)
        if episode is not None:
            await episode.close()
        await self._graded(self._grader.close_episode, metadata["row"])

    async def global_post_process_and_metrics(  # type: ignore[override]  # may be a coroutine function
        self, batch: "BatchedDataDict[Any]"
    ) -> tuple["BatchedDataDict[Any]", dict[str, float | int]]:
        """Sum the counts of calls over B samples, and let the grader correct rewards and add its metrics."""
        states: list[ToolState] = batch["extra_env_info"]
        rows = batch.copy()
        rows["extra_env_info"] = [state["row"] for state in states]
        graded, metrics = await self._graded(self._grader.post_process, rows)
        totals: Counter[str] = Counter()
        for state in states:
            totals.update(state["counts"])
        with_calls = sum(state["counts"]["tool_calls"] > 0 for state in states) / max(len(states), 1)
        waited = sum(state["tool_s"] for state in states) / max(len(states), 1)
        own = {name: totals[name] for name in COUNTS} | {"share_with_tool_calls": with_calls, "mean_tool_s": waited}
        return graded, {**metrics, **own}

    async def shutdown(self) -> None:  # type: ignore[override]  # may be a coroutine function
        """Close all episodes and shared tools, and the grader."""
        await asyncio.gather(*(episode.close() for episode in self._episodes.values()), return_exceptions=True)
        self._episodes.clear()
        await self._toolbox.shutdown()
        await self._graded(self._grader.shutdown)
        self._threads.shutdown(wait=False)

    async def _final(self, log: "LLMMessageLogType", state: ToolState) -> EnvironmentReturn[ToolState]:
        """Let the grader answer a response without a call, and keep the grader's metadata for its next turn."""
        graded = await self._graded(self._grader.step, log, state["row"])
        rows = [{**state, "row": row} for row in graded.metadata]
        return graded._replace(metadata=rows)

    async def _graded(self, method: Any, *arguments: Any) -> Any:
        """Call a method of the grader: await a coroutine function here, or run a function on a thread."""
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        outcome = await asyncio.get_running_loop().run_in_executor(self._threads, method, *arguments)
        return await outcome if inspect.iscoroutine(outcome) else outcome

    async def _made(self, calls: Sequence[ToolCall], episode: Episode) -> list[CallResult]:
        """Make the calls of one response, at the same time."""
        if not calls:
            return [CallResult("Error: the tool call cannot be read", kind="malformed_tool_calls")]
        limit = self.cfg.max_calls_per_turn
        made = await asyncio.gather(*(self._call(call, episode) for call in calls[:limit]))
        text = f"Error: only {limit} calls are allowed in one turn"
        return [*made, *(CallResult(text, call.name, "malformed_tool_calls") for call in calls[limit:])]

    async def _call(self, call: ToolCall, episode: Episode) -> CallResult:
        spec = self._specs.get(call.name)
        if spec is None:
            known = ", ".join(self._specs)
            return CallResult(f"Error: there is no tool {call.name!r}; there are: {known}", call.name, "unknown_tools")
        if call.arguments is None:
            text = f"Error: the arguments of {call.name} are not a JSON object"
            return CallResult(text, call.name, "malformed_tool_calls")
        try:
            arguments = spec.checked(call.arguments)
        except ValueError as error:
            return CallResult(f"Error: {call.name}: {error}", call.name, "wrong_arguments")
        output = await episode.tools_of(call.name).call(call.name, arguments)
        kind = {"error": "tool_errors", "timeout": "tool_timeouts", None: None}[output.fault]
        if not output.parts:
            return CallResult(self._cut_to_tokens(output.text), call.name, kind)
        try:
            return CallResult(await asyncio.to_thread(self._read, output.parts), call.name, kind)
        except DataError as error:
            return CallResult(f"Error: {call.name}: an image cannot be used: {error}", call.name, "tool_errors")

    def _read(self, parts: Sequence[Mapping[str, Any]]) -> Content:
        """Return parts with the files of their images.

        Raises:
            DataError: an image cannot be used.
        """
        limits = image_limits(self.cfg)
        made: list[Any] = []
        for part in parts:
            if part["type"] == "text":
                made.append({**part, "text": self._cut_to_tokens(part["text"])})
            else:
                made.append({**part, "image": load_image(part, limits).encoded})
        return made

    def _cut_to_tokens(self, text: str) -> str:
        most = self.cfg.max_output_tokens
        if most is None:
            return text
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return text if len(ids) <= most else str(self._tokenizer.decode(ids[:most])) + "\n[cut]"


def _require_tokenizer(config: ToolEnvironmentConfig) -> None:
    if config.tokenizer.name is None:
        raise ConfigError("env.tools.tokenizer.name is null. Give the tokenizer of the model that writes the calls.")


def _tokenizer_of(config: ToolEnvironmentConfig) -> "TokenizerType":
    keys = config.tokenizer.model_dump() | {"use_processor": bool(config.tokenizer.use_processor)}
    return get_tokenizer(TokenizerConfig.build(**keys), section="env.tools")


def _turn(
    results: Sequence[CallResult], state: ToolState, *, is_invalid: bool = False, errors: list[str | None] | None = None
) -> EnvironmentReturn[ToolState]:
    """Return the outputs of tools as messages. The episode ends only if there is an error."""
    messages = [{"role": "tool", "name": result.name or "tool", "content": result.content} for result in results]
    text = "\n".join(_text_of(result.content) for result in results)
    return EnvironmentReturn(
        observations=[{"role": "tool", "content": text, "messages": messages}],
        metadata=[state],
        next_stop_strings=[None],
        rewards=torch.zeros(1),
        terminateds=torch.zeros(1, dtype=torch.bool),
        errors=errors,
        invalid_tool_calls=[is_invalid],
    )


def _text_of(content: Content) -> str:
    """Return a content as text for logs, with `<image>` for each image."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else "<image>" for part in content)


def _counted(state: ToolState, results: Sequence[CallResult], seconds: float) -> ToolState:
    counts = Counter(state["counts"])
    counts["tool_calls"] += len(results)
    counts["invalid_tool_calls"] += sum(result.is_invalid for result in results)
    counts.update(result.kind for result in results if result.kind is not None)
    return {**state, "counts": dict(counts), "tool_s": state["tool_s"] + seconds}
