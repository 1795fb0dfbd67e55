"""Keys of `env`: one entry for each environment of a run, by name.

Invariant: built-in environments have a schema; any other name belongs to a user's environment, which gets its mapping
unchanged.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypedDict

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from nemo_rl.config.base.section import Section
from nemo_rl.config.base.structure import NamedSections


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


class SlidingPuzzleBoard(Section):
    """Boards of the sliding puzzle."""

    size: Annotated[int, Field(ge=2, le=9)] = 5
    """Rows and columns."""
    shuffle_moves: PositiveInt = 10
    """Random moves from the solved board, none of which undoes the previous one."""
    min_shuffle_moves: PositiveInt | None = None
    """Fewest random moves, from which their number is drawn up to shuffle_moves; null: always shuffle_moves."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.min_shuffle_moves is not None and self.min_shuffle_moves > self.shuffle_moves:
            raise PydanticCustomError(
                "range", f"min_shuffle_moves={self.min_shuffle_moves} is above shuffle_moves={self.shuffle_moves}"
            )
        return self


class SlidingPuzzleConfig(Section):
    """The sliding puzzle."""

    game_config: SlidingPuzzleBoard = Field(default_factory=SlidingPuzzleBoard.build)
    max_moves: PositiveInt = 30
    """Actions after which an episode ends as failed; an invalid action counts too."""


class GameSection(Section):
    """An environment in which each turn of the model is one action, which ends with `</action>`."""

    stop_strings: ClassVar[list[str]] = ["</action>"]


class SlidingPuzzleEnvironmentConfig(GameSection):
    """The environment sliding_puzzle_game."""

    cfg: SlidingPuzzleConfig = Field(default_factory=SlidingPuzzleConfig.build)


class BlackjackConfig(GameSection):
    """Blackjack against a dealer with fixed rules."""

    max_moves: PositiveInt = 12
    """Actions after which an episode ends as lost; an invalid action counts too."""


def stop_strings_of(environments: Mapping[str, Any], name: str | None) -> list[str] | None:
    """Return the stop strings of an environment that has a schema."""
    section = environments.get(name or "")
    return section.stop_strings if isinstance(section, MathEnvironmentConfig | GameSection) else None


class BuiltInEnvironments(TypedDict, total=False):
    """Environments with a schema."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    math: MathEnvironmentConfig
    sliding_puzzle_game: SlidingPuzzleEnvironmentConfig
    blackjack: BlackjackConfig


_LATER = (("should_use_nemo_gym", "NeMo-Gym"),)

EnvironmentMap = Annotated[dict[str, Any], NamedSections(BuiltInEnvironments, _LATER)]
