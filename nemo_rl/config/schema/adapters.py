"""Keys of environments that other libraries provide."""

from typing import Any, ClassVar

from pydantic import Field

from nemo_rl.config.base.numbers import Count
from nemo_rl.config.base.section import Section
from nemo_rl.config.schema.games import GameSection


class GymnasiumConfig(GameSection):
    """An environment of Gymnasium with discrete actions (extra gymnasium)."""

    id: str
    """Name under which it is registered, such as FrozenLake-v1."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments for gymnasium.make."""
    action_names: list[str] | None = None
    """Words for the actions, in their order; null: their numbers."""
    rendered: bool = False
    """Show the environment as its text rendering (render_mode ansi) instead of the observation."""
    instructions: str | None = None
    """First lines of the prompt; null: the name."""
    max_moves: Count | None = None
    """Actions after which an episode ends; null: only the environment ends it."""


class TextArenaConfig(GameSection):
    """A game of TextArena for one player (extra textarena)."""

    id: str
    """Name under which it is registered, such as TowerOfHanoi-v0."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments for textarena.make."""
    max_moves: Count | None = None
    """Actions after which an episode ends; null: only the game ends it."""


class ReasoningGymConfig(GameSection):
    """A generated task of Reasoning Gym (extra reasoning-gym)."""

    stop_strings: ClassVar[list[str]] = ["</answer>"]

    dataset: str
    """Name of the task, such as chain_sum."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task."""


class VerifiersConfig(Section):
    """An environment of the package verifiers, version 0.1 (extra verifiers)."""

    id: str
    """Module with a function load_environment, or the name of an installed environment."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments for load_environment."""
    stop_strings: list[str] | None = None
    """Texts that end the turns, besides policy.generation.stop_strings."""
