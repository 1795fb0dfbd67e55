"""Keys of the games: environments in which each turn of the model is one action."""

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from nemo_rl.config.base.numbers import Count
from nemo_rl.config.base.section import Section


class GameSection(Section):
    """An environment in which each turn of the model is one action, which ends with `</action>`."""

    stop_strings: ClassVar[list[str]] = ["</action>"]


class SlidingPuzzleBoard(Section):
    """Boards of the sliding puzzle."""

    size: Annotated[int, Field(ge=2, le=9)] = 5
    """Rows and columns."""
    shuffle_moves: Count = 10
    """Random moves from the solved board, none of which undoes the previous one."""
    min_shuffle_moves: Count | None = None
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
    """The board."""
    max_moves: Count = 30
    """Actions after which an episode ends as failed; an invalid action counts too."""


class SlidingPuzzleEnvironmentConfig(GameSection):
    """The environment sliding_puzzle_game."""

    cfg: SlidingPuzzleConfig = Field(default_factory=SlidingPuzzleConfig.build)
    """The board and the moves."""


class BlackjackConfig(GameSection):
    """Blackjack against a dealer with fixed rules."""

    max_moves: Count = 12
    """Actions after which an episode ends as lost; an invalid action counts too."""
