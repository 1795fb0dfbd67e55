"""The task that an agent program gets, and the interface of classes that start programs.

Invariant: no `repr` contains the key of a task.
"""

import abc
import hashlib
import hmac
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from nemo_rl.host.boundary import Boundary

_KEYS = ("reward", "answer", "metrics", "call_rewards")
_SHOWN_CHARS = 65536
"""Largest number of characters of a value in an error. `environment` shortens the error after replacing the key."""


@dataclass(frozen=True)
class AgentResult:
    """Result of one program."""

    reward: float | None = None
    """Reward of the program, or None if it returned none."""
    answer: str | None = None
    """Final text of the program, or None if it returned none."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers by name, which are averaged over samples."""
    call_rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of single calls, by the ids of the endpoint's responses."""


def read_result(value: Any) -> AgentResult:
    """Read a returned number or bool (the reward), text (the answer), mapping with both and more, or None.

    Raises:
        ValueError: the value is something else, or a number in it is not finite.
    """
    if value is None:
        return AgentResult()
    if isinstance(value, str):
        return AgentResult(answer=value)
    if not isinstance(value, Mapping):
        return AgentResult(reward=finite_number(value, "reward"))
    unknown = [key for key in value if key not in _KEYS]
    if unknown:
        raise ValueError(f"it returned the keys {_shown(unknown)}, but only {', '.join(_KEYS)} have a meaning")
    reward, answer = value.get("reward"), value.get("answer")
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"it returned the answer {_shown(answer)}, which is no text")
    return AgentResult(
        reward=None if reward is None else finite_number(reward, "reward"),
        answer=answer,
        metrics=_numbers(value.get("metrics"), "metrics"),
        call_rewards=_numbers(value.get("call_rewards"), "call_rewards"),
    )


def _numbers(values: Any, key: str) -> dict[str, float]:
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ValueError(f"it returned {key}={_shown(values)}, which is no mapping of names to numbers")
    return {str(name): finite_number(number, f"{key}.{name}") for name, number in values.items()}


def finite_number(value: Any, key: str) -> float:
    """Return a number that a program returned as a float.

    Args:
        key: name of the number, for the error.

    Raises:
        ValueError: the value is not a finite number.
    """
    if not isinstance(value, Real):
        raise ValueError(f"it returned {key}={_shown(value)}, which is no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"it returned {key}={_shown(value)}, which is not finite")
    return number


def _shown(value: Any) -> str:
    with Boundary(Exception) as caught:  # the class may be the user's own
        text = repr(value)
    if caught:
        return f"a {type(value).__name__} whose text raises {type(caught.take()).__name__}"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]} ..."


AGENT = "agent"
"""Key of the metadata under which the endpoint's address and the sample's key are."""
KEY_FIELD = "nemo_rl_key"
"""Field of a request's body with the sample's key, for programs that cannot choose the API key of requests."""
CALL_REWARDS = "call_rewards"
"""Key that a step adds to the metadata if the program rewarded single calls, with the rewards by response id."""


START_SIGN = "."
"""Separator in a key between the part of the sample and the part of one start of the sample's program."""


def key_of_start(key: str, secret: str) -> str:
    """Make the key of one start of a sample's program. By this key the endpoint recognises a new start.

    Args:
        key: key of the sample.
        secret: secret of the sample. The program does not see it, and so cannot pretend to be started again.
    """
    number = secrets.token_hex(4)
    return f"{key}{START_SIGN}{number}-{_signature(number, secret)}"


def is_start(text: str, secret: str) -> bool:
    """Return whether the part of a key after `START_SIGN` was made with a sample's secret."""
    number, _, signature = text.partition("-")
    return hmac.compare_digest(signature.encode(), _signature(number, secret).encode())


def _signature(number: str, secret: str) -> str:
    return hmac.new(secret.encode(), number.encode(), hashlib.sha256).hexdigest()[:16]


@dataclass(frozen=True)
class AgentTask:
    """One sample, as its program gets it.

    Several programs run in one process, so a function must pass `base_url` and `api_key` to its client. The environment
    variables of `environment` are only for processes that the function starts.
    """

    messages: Sequence[Mapping[str, Any]]
    """Messages of the prompt, as the data has them. Images are parts of the type `image_url` with data: addresses."""
    tools: Sequence[Mapping[str, Any]] | None
    """Tools of the row in OpenAI's form, or None if it has none."""
    row: Mapping[str, Any]
    """Fields of the row that the program may see (`env.agent.row_fields`)."""
    base_url: str
    """Address of the endpoint, up to `/v1`."""
    api_key: str = field(repr=False)
    """Key of this sample. Calls with this key belong to the sample."""
    model: str
    """Name of the model in requests."""
    seed: int
    """Seed of this sample. Samples of one prompt have different seeds."""
    timeout_s: float
    """Time in seconds after which the program is ended."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which clients of OpenAI and Anthropic find the endpoint."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
        }

    @property
    def as_json(self) -> dict[str, Any]:
        """Return the fields by name, for programs that read JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def without_key(self, text: str) -> str:
        """Return a text with `***` in place of the key. Texts are cut only afterwards, so no part of the key stays."""
        for key in (self.api_key, self.api_key.partition(START_SIGN)[0]):
            text = text.replace(key, "***") if key else text
        return text


class AgentError(Exception):
    """Raised if a program failed or returned an invalid result. The message becomes the error of the sample."""


class AgentProgram(abc.ABC):
    """Interface of classes that start one program for each task. Several programs can run at the same time."""

    @abc.abstractmethod
    async def run(self, task: AgentTask) -> AgentResult:
        """Run the program until its end or its deadline, or until this call is cancelled.

        Raises:
            AgentError: the program failed, was too slow, or returned no result.
        """

    async def shutdown(self) -> None:  # noqa: B027  (optional hook)
        """Release the resources that the programs share."""


def too_slow(task: AgentTask, key: str = "env.agent.timeout_s") -> AgentError:
    """Make the error of a program that missed its deadline, which `key` sets."""
    return AgentError(f"the program gave no result in {task.timeout_s:g} s ({key}) and was ended")
