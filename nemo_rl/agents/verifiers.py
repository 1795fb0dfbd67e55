"""Play environments of the package verifiers, which provide prompts, turns and rewards (by a rubric).

    open_episode ─► a task of its own: rollout, then rubric ─► asks "the model" ─► messages of the prompt
    step: text of the turn ─► answer of "the model" ─► asks again ─► the added messages are the observation
                                                    └─► is over ─► reward of the rubric

Invariant: a reward is the result of all reward functions of the rubric. If one of them raises, the sample gets an
error, although the package itself would count a reward of 0.
"""

import asyncio
import contextlib
import functools
import inspect
import math
import signal
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from nemo_rl.config.schema.kits import VerifiersConfig
from nemo_rl.data.messages.content import content_text
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, EpisodeStart
from nemo_rl.host.boundary import Boundary, raised_as
from nemo_rl.kits.adapters.packages import library
from nemo_rl.utils.errors import ConfigError

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import LLMMessageLogType, TokenizerType
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

verifiers = library("verifiers", "verifiers")

_MODEL = "policy"
_failures: ContextVar[list[str]] = ContextVar("failures")
"""Errors that reward functions raised while the current task was scored."""


class VerifiersEnvironment(EnvironmentInterface[dict[str, Any]]):
    """The environment `verifiers`.

    Args:
        cfg: `env.verifiers`.

    Raises:
        ConfigError: there is no such environment, or it needs more than messages of text.
    """

    config_class: ClassVar[type | None] = VerifiersConfig

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self._config = VerifiersConfig.build(**cfg)
        self._environment = _loaded(self._config)
        for rubric in _rubrics(self._environment.rubric):
            rubric.funcs = [_noted(function) for function in rubric.funcs]
        self._episodes: dict[str, _Episode] = {}

    @classmethod
    def check_section(cls, section: Mapping[str, Any], place: str, tokenizer: "TokenizerType | None" = None) -> None:
        """Check the section, and load the environment with its rows if data is read."""
        if tokenizer is not None:
            _loaded(VerifiersConfig.build(**section))

    async def open_episode(  # type: ignore[override]  # may be a coroutine function
        self, metadata: dict[str, Any]
    ) -> EpisodeStart[dict[str, Any]]:
        """Start the episode of a seed, which determines the row. The environment's first request becomes the prompt."""
        rows = self._rows(metadata.get("split"))
        episode = _Episode(self._environment, rows[metadata["seed"] // 2 % len(rows)])
        key = uuid.uuid4().hex
        self._episodes[key] = episode
        state = {**metadata, "episode": key}
        messages = await episode.next_messages(None)
        if messages is None:
            return EpisodeStart(state, error=episode.error or "the environment is over before its first turn")
        return EpisodeStart(state, _observation(messages))

    async def step(  # type: ignore[override]  # may be a coroutine function
        self, message_log_batch: list["LLMMessageLogType"], metadata: list[dict[str, Any]]
    ) -> EnvironmentReturn[dict[str, Any]]:
        """Pass the answer of one turn to the environment (B is 1)."""
        (log,), (state,) = message_log_batch, metadata
        episode = self._episodes.get(state["episode"])
        if episode is None:
            return _returned(state, error="the process of the environment `verifiers` died, and with it this episode")
        messages = await episode.next_messages(content_text(log[-1]["content"]))
        if messages is not None:
            return _returned(state, messages)
        if episode.error is not None:
            return _returned(state, error=episode.error)
        return _returned({**state, "scores": episode.scores}, episode.last_messages, episode.reward)

    async def close_episode(self, metadata: dict[str, Any]) -> None:  # type: ignore[override]
        """End an episode, and run the environment's clean-up."""
        episode = self._episodes.pop(metadata.get("episode", ""), None)
        if episode is not None:
            await episode.close()

    def global_post_process_and_metrics(
        self, batch: "BatchedDataDict[Any]"
    ) -> tuple["BatchedDataDict[Any]", dict[str, float | int]]:
        """Return the mean of each reward function over the samples that were scored."""
        values: dict[str, list[float]] = defaultdict(list)
        for state in batch["extra_env_info"]:
            for name, value in (state.get("scores") or {}).items():
                values[name].append(value)
        return batch, {name: sum(each) / len(each) for name, each in values.items()}

    async def shutdown(self) -> None:  # type: ignore[override]
        """End all episodes."""
        await asyncio.gather(*(episode.close() for episode in self._episodes.values()))
        self._episodes.clear()

    def _rows(self, split: str | None) -> Any:
        return self._environment.get_eval_dataset() if split == "validation" else self._environment.get_dataset()


class _Episode:
    """One rollout of an environment. Two queues connect the rollout to the policy, which is used as its model."""

    def __init__(self, environment: Any, row: Mapping[str, Any]) -> None:
        self.reward = 0.0
        """Weighted sum of the values of the reward functions."""
        self.scores: dict[str, float] = {}
        """Value of each reward function by name."""
        self.last_messages: list[dict[str, Any]] = []
        """Messages after the last turn."""
        self.error: str | None = None
        """Reason why there is no reward, or None."""
        self._asked: asyncio.Queue[list[dict[str, Any]]] = asyncio.Queue()
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        self._conversation: list[dict[str, Any]] = []
        self._playing = asyncio.create_task(self._play(environment, row))

    async def next_messages(self, answer: str | None) -> list[dict[str, Any]] | None:
        """Return the messages that the environment added before its next request, or None if the episode is over."""
        if answer is not None:
            self._conversation.append({"role": "assistant", "content": answer})
            self._answers.put_nowait(answer)
        asking = asyncio.create_task(self._asked.get())
        try:
            await asyncio.wait([asking, self._playing], return_when=asyncio.FIRST_COMPLETED)
        finally:
            asking.cancel()
        if not asking.done() or asking.cancelled():
            return None
        return self._added(asking.result())

    def _added(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """Return the messages that a request adds to the conversation so far, with which the request must begin."""
        before = len(self._conversation)
        added = messages[before:]
        if messages[:before] != self._conversation or not added:
            self.error = "the environment rewrites earlier messages, which the tokens that were sampled cannot follow"
            return None
        self._conversation = messages
        return added

    async def close(self) -> None:
        """Cancel the rollout if it is still running."""
        self._playing.cancel()
        await asyncio.wait([self._playing])

    async def _play(self, environment: Any, row: Mapping[str, Any]) -> None:
        failures: list[str] = []
        _failures.set(failures)
        completions = SimpleNamespace(create=self._completion)
        client = SimpleNamespace(chat=SimpleNamespace(completions=completions))
        with Boundary(Exception) as caught:  # the environment is user code
            state = await environment.rollout(dict(row), client, _MODEL, {})
            if state["error"] is None:
                await environment.rubric.score_rollout(state)
        if caught:
            error = caught.take()
            self.error = f"the environment raised {type(error).__name__}: {error}"
            return
        if state["error"] is not None:
            failures.append(f"the environment reports {state['error'].__cause__ or state['error']!r}")
        elif not math.isfinite(state["reward"]):
            failures.append(f"the reward is {state['reward']}")
        if failures:
            self.error = "; ".join(failures)
            return
        self.reward, self.scores = float(state["reward"]), dict(state["metrics"] or {})
        self.last_messages = [_plain(message) for message in state.get("final_env_response") or []]

    async def _completion(self, *, messages: Sequence[Any], tools: Any = None, **_: Any) -> Any:
        """Pass a request to the policy instead of an endpoint, and return the answer as a chat completion."""
        if tools:
            raise ConfigError("the environment offers tools to the model; the adapter passes on texts only")
        self._asked.put_nowait([_plain(message) for message in messages])
        text = await self._answers.get()
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        about = {"id": uuid.uuid4().hex, "created": 0, "model": _MODEL, "object": "chat.completion"}
        return verifiers.types.ChatCompletion.model_validate({**about, "choices": [choice]})


def _loaded(config: VerifiersConfig) -> Any:
    """Load the environment."""
    place = f"env.verifiers.id={config.id!r}"
    if not hasattr(verifiers, "load_environment"):
        raise ConfigError("env.verifiers needs verifiers 0.1, whose environments a function load_environment makes.")
    given = f"{place} with kwargs={config.kwargs}"
    # the environment is user code
    with raised_as(lambda error: ConfigError(f"{given} cannot be loaded: {error}")), _signals_kept():
        environment = verifiers.load_environment(config.id, **config.kwargs)
        environment.get_eval_dataset()
    if environment.message_type != "chat" or environment.oai_tools:
        needs = "tools" if environment.oai_tools else "plain completions"
        raise ConfigError(f"{place} needs {needs}, and the adapter passes on texts of a chat only.")
    return environment


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Prevent environments from replacing the signal handlers of the process, which belong to Ray.

    Each environment tries this when it is constructed, and fails on threads other than the main thread.
    """
    set_handler = signal.signal
    signal.signal = lambda number, handler: signal.getsignal(number)  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = set_handler


def _rubrics(rubric: Any) -> list[Any]:
    """Return the rubric, or all rubrics of a group. A group may contain further groups."""
    inner = getattr(rubric, "rubrics", None)
    return [rubric] if inner is None else [leaf for each in inner for leaf in _rubrics(each)]


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reward function that also records its exceptions."""

    @functools.wraps(function)
    async def noted(*arguments: Any, **keywords: Any) -> Any:
        try:
            value = function(*arguments, **keywords)
            return await value if inspect.isawaitable(value) else value
        except Exception as error:  # the package turns this into a reward of 0
            name = getattr(function, "__name__", repr(function))
            _failures.get().append(f"the reward function {name} raised {type(error).__name__}: {error}")
            raise

    return noted


def _plain(message: Any) -> dict[str, Any]:
    """Return a message with only its role and its text."""
    return {"role": message["role"], "content": content_text(message["content"] or "")}


def _observation(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    role = messages[-1]["role"] if messages else "environment"
    whole = {"role": role, "content": "\n".join(message["content"] for message in messages)}
    return {**whole, "messages": list(messages)} if len(messages) > 1 else whole


def _returned(
    state: dict[str, Any],
    messages: Sequence[dict[str, Any]] = (),
    reward: float | None = None,
    error: str | None = None,
) -> EnvironmentReturn[dict[str, Any]]:
    is_over = reward is not None or error is not None
    return EnvironmentReturn(
        observations=[_observation(messages)],
        metadata=[state],
        next_stop_strings=[None],
        rewards=torch.tensor([reward or 0.0]),
        terminateds=torch.tensor([is_over]),
        errors=[error],
    )
