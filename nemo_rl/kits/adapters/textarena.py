"""Play games of TextArena for one player."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemo_rl.config.schema.kits import TextArenaConfig
from nemo_rl.kits.adapters.packages import library
from nemo_rl.kits.adapters.replayed_game import GameAnswer, ReplayedGame
from nemo_rl.kits.games.text_game import GameEnvironment, observed
from nemo_rl.utils.errors import ConfigError

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import TokenizerType

textarena = library("textarena", "textarena")

_ADVICE = "Write your action between <action> and </action>, in the form that the rules above ask for."


class TextArenaGame(ReplayedGame[Any]):
    """One game of TextArena. The game gets the text between the action tags unchanged.

    Args:
        config: the section `env.textarena`.

    Raises:
        ConfigError: there is no such game, or it is not for one player.
    """

    def __init__(self, config: TextArenaConfig) -> None:
        super().__init__()
        self._config = config
        game, _ = self.open_game(0, 0)
        self.close_game(game)

    def open_game(self, seed: int, episode_seed: int) -> tuple[Any, str]:
        """Make the game and set it up with the seed of the row."""
        config = self._config
        try:
            game = textarena.make(config.id, **config.kwargs)
            game.reset(num_players=1, seed=seed)
        except (AssertionError, ImportError, KeyError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"env.textarena.id={config.id!r} with kwargs={config.kwargs} cannot be played alone: {error}"
            ) from None
        _, text = game.get_observation()
        game.shown = str(text)
        return game, f"{game.shown.strip()}\n{_ADVICE}"

    def act(self, handle: Any, action: str) -> GameAnswer:
        """Take one action. The reward of the game (-1 to 1) comes with its last action."""
        is_over, _ = handle.step(action)
        if is_over:
            rewards, info = handle.close()
            is_valid = not info[0].get("invalid_move", False)
            return GameAnswer(str(info[0].get("reason", "The game is over.")), float(rewards[0]), True, is_valid)
        _, text = handle.get_observation()
        added = str(text).removeprefix(handle.shown)
        handle.shown = str(text)
        is_valid = not getattr(handle.state, "error_count", 0)
        return GameAnswer(observed(added.removeprefix(f"[GAME] {action}\n").strip()), 0.0, False, is_valid)

    def close_game(self, handle: Any) -> None:
        """Do nothing, because a game of TextArena holds no resources."""


class TextArenaEnvironment(GameEnvironment):
    """The environment `textarena`.

    Args:
        cfg: `env.textarena`.
    """

    config_class = TextArenaConfig

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        config = TextArenaConfig.build(**cfg)
        super().__init__(TextArenaGame(config), config.max_moves)

    @classmethod
    def check_section(cls, section: Mapping[str, Any], place: str, tokenizer: "TokenizerType | None" = None) -> None:
        """Check the section by making the game once (`EnvironmentInterface.check_section`)."""
        TextArenaGame(TextArenaConfig.build(**section))
