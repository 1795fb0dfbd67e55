"""Keys of `env`: one entry for each environment of a run, by name.

Invariant: built-in environments have a schema; any other name belongs to a user's environment, which gets its mapping
unchanged.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict

from pydantic import ConfigDict, PositiveFloat, PositiveInt

from nemo_rl.config.base.section import Section
from nemo_rl.config.base.structure import NamedSections


class EnvironmentSection(Section):
    """Keys of every environment, which the library reads; environments without a schema may have them too."""

    step_timeout_s: PositiveFloat | None = None
    """Seconds for the environment to answer one sample; null: cluster.timeouts.environment_s."""
    max_memory_gb: PositiveFloat | None = None
    """Gibibytes that an actor of the environment may use, with the processes that it started; above this it is ended,
    and started again. null: no limit."""
    max_open_episodes: PositiveInt | None = None
    """Episodes of this environment that are played at the same time; null: all."""


class MathEnvironmentConfig(EnvironmentSection):
    """Comparison of the model's final answer with the known one."""

    num_workers: PositiveInt = 8
    """Processes that check answers."""
    stop_strings: list[str] | None = None
    """Texts that end the answers this environment grades, besides policy.generation.stop_strings."""
    verifier_type: Literal["math", "english_multichoice", "multilingual_multichoice"] | None = "math"
    """Kind of comparison: as mathematics or as a choice letter."""
    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] | None = "hf_math_verify"
    """Rule for mathematics: math-verify, or DAPO's strict match."""
    timeout_s: PositiveFloat = 10.0
    """Seconds for one answer; afterwards it counts as a reward error."""


def stop_strings_of(environments: Mapping[str, Any], name: str | None) -> list[str] | None:
    """Return the stop strings of an environment that has a schema."""
    section = environments.get(name or "")
    return section.stop_strings if isinstance(section, MathEnvironmentConfig) else None


class BuiltInEnvironments(TypedDict, total=False):
    """Environments with a schema."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    math: MathEnvironmentConfig


_LATER = (("should_use_nemo_gym", "NeMo-Gym"),)

EnvironmentMap = Annotated[dict[str, Any], NamedSections(BuiltInEnvironments, _LATER)]
