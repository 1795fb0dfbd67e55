"""Reward answers with plain functions that a configuration names or a program passes.

    answer, row ─► function ─► number          one answer at a time
    answers, rows ─► function ─► numbers       a function whose first parameter is named `answers`

A function may be a coroutine function. `row` has the columns of the data set's row. Invariant: a function that raises
or does not return a finite number gives its samples an error that names the reward, never a reward of 0.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, override

import torch

from nemo_rl.config.base.names import ROW
from nemo_rl.config.schema.env import RewardFunctionsConfig
from nemo_rl.data.messages.content import content_text
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.user_errors import describe
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.imports import import_dotted

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import LLMMessageLogType, TokenizerType

BATCH_PARAMETER = "answers"
"""Name of the first parameter of a function that gets lists of answers and rows."""

_FORMS = (
    "A reward is a function of (answer, row) that returns a number, or of (answers, rows), two lists, that returns a "
    "list of numbers; it may leave out the second parameter"
)
_PLACE = "env.reward"

type Outcome = tuple[float, str | None]
"""Reward and None, or an unused value and the reason why there is no reward."""


@dataclass(frozen=True)
class NamedReward:
    """A function with its name and weight."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Check that the function can be called with an answer and a row, or with an answer alone.

        Raises:
            ConfigError: `function` is not a function, or has other parameters.
        """
        if not callable(self.function):
            raise ConfigError(f"the reward {self.name!r} is {self.function!r:.100}, which is no function. {_FORMS}.")
        signature = self._signature()
        if signature is not None and not any(_takes(signature, count) for count in (1, 2)):
            raise ConfigError(f"the reward {self.name!r} has the parameters {signature}. {_FORMS}.")

    @property
    def takes_lists(self) -> bool:
        """True if the function gets the answers of several samples in one call."""
        signature = self._signature()
        return signature is not None and next(iter(signature.parameters), "") == BATCH_PARAMETER

    async def values(self, answers: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Return the outcome of each of B samples.

        Raises:
            Exception: a function that gets lists failed for several samples. The caller then tries each sample alone.
        """
        if self.takes_lists and len(answers) > 1:
            numbers = map(self._number, await self._of_lists(answers, rows))
        else:
            numbers = map(self._one, answers, rows)
        found = await asyncio.gather(*numbers, return_exceptions=True)
        return [(0.0, self._reason(each)) if isinstance(each, BaseException) else (each, None) for each in found]

    async def _one(self, answer: str, row: Mapping[str, Any]) -> float:
        if self.takes_lists:
            return await self._number((await self._of_lists([answer], [row]))[0])
        return await self._number(await self._called(answer, row))

    async def _of_lists(self, answers: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
        found = await self._called(list(answers), list(rows))
        if isinstance(found, str | bytes) or not hasattr(found, "__len__"):
            raise TypeError(f"the reward {self.name!r} returned {found!r:.80} for lists, not a list of numbers")
        if len(found) != len(answers):
            raise ValueError(f"the reward {self.name!r} returned {len(found)} numbers for {len(answers)} answers")
        values: Sequence[Any] = found
        return values

    async def _called(self, answer: Any, row: Any) -> Any:
        signature = self._signature()
        arguments = (answer, row) if signature is None or _takes(signature, 2) else (answer,)
        result = self.function(*arguments)
        return await result if inspect.isawaitable(result) else result

    async def _number(self, value: Any) -> float:
        """Return a value times the weight. It is a coroutine so that `gather` keeps each sample's error."""
        if value is None or isinstance(value, str | bytes) or not hasattr(value, "__float__"):
            lists = isinstance(value, list | tuple) and not self.takes_lists
            advice = ". Name its first parameter `answers` if it takes and returns lists" if lists else ""
            raise TypeError(f"the reward {self.name!r} returned {value!r:.80}, not a number{advice}")
        number = self.weight * float(value)
        if not math.isfinite(number):
            raise ValueError(f"the reward {self.name!r} returned {value!r:.80}, which is not a finite number")
        return number

    def _reason(self, error: BaseException) -> str:
        return f"{describe(error)}, in the reward {self.name!r}"

    def _signature(self) -> inspect.Signature | None:
        try:
            return inspect.signature(self.function)
        except (TypeError, ValueError):  # functions written in C may have no signature
            return None


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


class RewardEnvironment(EnvironmentInterface[dict[str, Any]]):
    """Rewards the last turn of a conversation with functions, and ends the episode.

    Args:
        cfg: the section `env.<name>` or its dict.
        rewards: functions in place of those that the section names.
    """

    config_class: ClassVar[type | None] = RewardFunctionsConfig
    steps_samples_alone: ClassVar[bool | None] = False
    pooled: ClassVar[bool] = True
    calls_own_code: ClassVar[bool] = True

    def __init__(
        self, cfg: RewardFunctionsConfig | Mapping[str, Any] | None = None, rewards: Sequence[NamedReward] = ()
    ) -> None:
        section = cfg if isinstance(cfg, RewardFunctionsConfig) else RewardFunctionsConfig.build(**(cfg or {}))
        self._rewards = list(rewards) or named_rewards(section)

    @override
    @classmethod
    def check_section(cls, section: Mapping[str, Any], place: str, tokenizer: "TokenizerType | None" = None) -> None:
        named_rewards(RewardFunctionsConfig.build(**section), place)

    @classmethod
    def of_functions(cls, functions: Mapping[str, Callable[..., Any]], weights: Mapping[str, float]) -> Self:
        """Make an environment of functions that a program passes.

        Raises:
            ConfigError: one of them cannot be used.
        """
        return cls(rewards=_weighted(functions, weights))

    @override
    async def step(  # type: ignore[override]
        self, message_log_batch: list["LLMMessageLogType"], metadata: list[dict[str, Any]]
    ) -> EnvironmentReturn[dict[str, Any]]:
        answers = [content_text(log[-1]["content"]) for log in message_log_batch]
        rows = [_row(item) for item in metadata]
        outcomes = [await reward.values(answers, rows) for reward in self._rewards]
        rewards = {
            reward.name: torch.tensor([value for value, _ in column], dtype=torch.float64)
            for reward, column in zip(self._rewards, outcomes, strict=True)
        }
        errors = [next((error for _, error in sample if error), None) for sample in zip(*outcomes, strict=True)]
        count = len(metadata)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * count,
            metadata=metadata,
            next_stop_strings=[None] * count,
            rewards=rewards if len(rewards) > 1 else next(iter(rewards.values())),
            terminateds=torch.ones(count, dtype=torch.bool),
            errors=errors,
        )


def named_rewards(section: RewardFunctionsConfig, place: str = _PLACE) -> list[NamedReward]:
    """Import the functions that a section names.

    Args:
        place: key of the section.

    Raises:
        ConfigError: the section names no function, or one that cannot be imported or used. The message has the key.
    """
    key = f"{place}.function"
    if not section.function:
        raise ConfigError(
            f"{key} is missing. Give the dotted path of a function, for example my_file.my_reward, or several by name. "
            "(A run of a program that passes functions, nemo_rl.grpo(reward=...), cannot be started from its file.)"
        )
    paths = section.function if isinstance(section.function, dict) else {"": section.function}
    functions = {}
    for name, path in paths.items():
        functions[name or path.rpartition(".")[2]] = imported(path, f"{key}.{name}" if name else key)
    return _weighted(functions, section.weights, place)


def imported(path: str, key: str) -> Callable[..., Any]:
    """Import a function.

    Raises:
        ConfigError: there is no such function. The message has the key.
    """
    advice = "Write file.function; the file is found in the folder where the run is started, or is installed."
    function: Callable[..., Any] = import_dotted(path, ConfigError, f"{key}={path!r}", advice)
    return function


def _weighted(
    functions: Mapping[str, Callable[..., Any]], weights: Mapping[str, float], place: str = _PLACE
) -> list[NamedReward]:
    unknown = sorted(weights.keys() - functions.keys())
    if unknown:
        raise ConfigError(
            f"{place}.weights has {', '.join(unknown)}, which is no reward. Rewards: {', '.join(functions)}."
        )
    return [NamedReward(name, function, weights.get(name, 1.0)) for name, function in functions.items()]


def _row(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of the data set's row, and the known answer that the data set read from these columns."""
    truth = metadata.get("ground_truth")
    known = {} if truth in (None, "") else {"ground_truth": truth}
    return {**known, **metadata.get(ROW, metadata)}
