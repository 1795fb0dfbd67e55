"""Convert the rewards that a program passes to the section `env` and, for functions, an environment.

Invariant: nothing large is imported before `made` is called, so that workers can be forked first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_rl.config.base.names import OVERRIDE_MARKER
from nemo_rl.utils.errors import ConfigError

type Reward = Callable[..., Any] | str
"""Function, or its dotted path."""
type Weighted = Reward | tuple[Reward, float]
"""Reward, and its weight if it is not 1."""
type Rewards = Weighted | Sequence[Weighted] | Mapping[str, Weighted]
"""One reward, or several rewards with or without names."""


class GivenRewards:
    """Rewards of a run.

    Args:
        given: functions, or None to compare answers with the known ones.

    Raises:
        ConfigError: `given` is empty, or a weight is not a number.
    """

    def __init__(self, given: Rewards | None) -> None:
        self._functions: dict[str, Reward] = {}
        self._weights: dict[str, float] = {}
        for name, each in ({} if given is None else _by_name(given)).items():
            self._functions[name] = each[0] if isinstance(each, tuple) else each
            if isinstance(each, tuple):
                self._weights[name] = _weight(name, each[1:])
        self.environment = "math" if given is None else "reward"
        """Name of the environment."""

    @property
    def are_functions(self) -> bool:
        """True if the program passes functions that a configuration cannot name."""
        return any(not isinstance(function, str) for function in self._functions.values())

    @property
    def section(self) -> dict[str, Any]:
        """The section `env`."""
        if self.environment == "math":
            return {OVERRIDE_MARKER: True, "math": {"num_workers": 1}}
        named = {} if self.are_functions else {"function": dict(self._functions)}
        return {OVERRIDE_MARKER: True, "reward": {**named, "weights": dict(self._weights)}}

    def made(self) -> dict[str, Any]:
        """Return the environment of the functions by its name, or {} if the configuration names all functions.

        Raises:
            ConfigError: a function cannot be used.
        """
        if not self.are_functions:
            return {}
        from nemo_rl.environments.reward_functions import RewardEnvironment, imported

        functions = {
            name: imported(function, f"reward {name}") if isinstance(function, str) else function
            for name, function in self._functions.items()
        }
        return {self.environment: RewardEnvironment.of_functions(functions, self._weights)}


def _by_name(given: Rewards) -> dict[str, Weighted]:
    """Return rewards by name: the name of the function, or `reward` or `reward_<number>` for one without a name."""
    if isinstance(given, Mapping):
        named = {str(name): each for name, each in given.items()}
    else:
        several: list[Any] = list(given) if isinstance(given, list) else [given]
        named = {}
        for number, each in enumerate(several, start=1):
            name = _name_of(each[0] if isinstance(each, tuple) else each)
            usual = "reward" if len(several) == 1 else f"reward_{number}"
            named[name if name and name not in named else usual] = each
    if not named:
        raise ConfigError("reward is empty. Give a function, or leave it out to compare with the column answer.")
    return named


def _name_of(function: Any) -> str:
    name = function.rpartition(".")[2] if isinstance(function, str) else getattr(function, "__name__", "")
    return name if name.isidentifier() else ""


def _weight(name: str, given: Sequence[Any]) -> float:
    if len(given) != 1 or isinstance(given[0], bool) or not isinstance(given[0], int | float):
        raise ConfigError(
            f"the reward {name!r} is not a pair of a function and its weight, a number: got {given!r:.80}."
        )
    return float(given[0])
