"""Keys of `env`: one entry for each environment of a run, by name.

Invariant: built-in environments have a schema; any other name belongs to a user's environment, which gets its mapping
unchanged.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict

from pydantic import ConfigDict, PositiveFloat, PositiveInt

from nemo_rl.config.base.section import Section
from nemo_rl.config.base.structure import NamedSections
from nemo_rl.config.schema.tools import RAGEnvironmentConfig, ToolEnvironmentConfig


class MathEnvironmentConfig(Section):
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
    known = MathEnvironmentConfig | ToolEnvironmentConfig | RAGEnvironmentConfig
    return section.stop_strings if isinstance(section, known) else None


class BuiltInEnvironments(TypedDict, total=False):
    """Environments with a schema."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    math: MathEnvironmentConfig
    tools: ToolEnvironmentConfig
    rag: RAGEnvironmentConfig


_LATER = (("should_use_nemo_gym", "NeMo-Gym"),)

EnvironmentMap = Annotated[dict[str, Any], NamedSections(BuiltInEnvironments, _LATER)]
