"""The task that an agent program gets, and the interface of what starts one.

Invariant: the key of a task is in no `repr`.
"""

import abc
import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.agents.programs.results import AgentResult

AGENT = "agent"
"""Key of the metadata that has the endpoint's address and the sample's key."""
KEY_FIELD = "nemo_rl_key"
"""Field of a request's body for the sample's key, for programs that cannot choose the API key of their requests."""
CALL_REWARDS = "call_rewards"
"""Key of the metadata that a step adds where the program rewarded single calls: rewards by the ids of responses."""


START_SIGN = "."
"""Stands in a key between the sample's part and the part of one start of its program."""


def key_of_start(key: str, secret: str) -> str:
    """Make the key of one start of a sample's program, so that the endpoint sees when it is started again.

    Args:
        key: of the sample.
        secret: of the sample, which its program does not see: it cannot pretend to be started again.
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

    Several programs run in one process, so a function passes `base_url` and `api_key` to its client; environment
    variables are only for processes that it starts.
    """

    messages: Sequence[Mapping[str, Any]]
    """Messages of the prompt, as the data has them."""
    tools: Sequence[Mapping[str, Any]] | None
    """Tools of the row in OpenAI's form; None without any."""
    row: Mapping[str, Any]
    """Fields of the row that the program may see, see `env.agent.row_fields`."""
    base_url: str
    """Address of the endpoint, up to `/v1`."""
    api_key: str = field(repr=False)
    """Key of this sample; calls with it are the sample's calls."""
    model: str
    """Name of the model for requests."""
    seed: int
    """Seed of this sample; those of one prompt have different ones."""
    timeout_s: float
    """Seconds until the program is ended."""

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
        """The fields by name, for programs that read JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def without_key(self, text: str) -> str:
        """Return a text with `***` in place of the key. A text that is cut afterwards has no part of the key."""
        for key in (self.api_key, self.api_key.partition(START_SIGN)[0]):
            text = text.replace(key, "***") if key else text
        return text


class AgentError(Exception):
    """A program failed, or returned something that is no result; the text is the error of its sample."""


class AgentProgram(abc.ABC):
    """Starts one program for each task; several run at the same time."""

    @abc.abstractmethod
    async def run(self, task: AgentTask) -> AgentResult:
        """Run the program until its end or its deadline; cancelling this call ends it.

        Raises:
            AgentError: it failed, is too slow, or returned no result.
        """

    async def shutdown(self) -> None:  # noqa: B027  (optional hook)
        """Release what the programs share."""


def too_slow(task: AgentTask, key: str = "env.agent.timeout_s") -> AgentError:
    """Make the error of a program that missed its deadline, which `key` sets."""
    return AgentError(f"the program gave no result in {task.timeout_s:g} s ({key}) and was ended")
