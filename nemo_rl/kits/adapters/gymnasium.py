"""Play environments of Gymnasium with discrete actions as text games."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemo_rl.config.schema.kits import GymnasiumConfig
from nemo_rl.kits.adapters.packages import library
from nemo_rl.kits.adapters.replayed_game import GameAnswer, ReplayedGame
from nemo_rl.kits.games.text_game import GameEnvironment, observed
from nemo_rl.utils.errors import ConfigError

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import TokenizerType

gymnasium = library("gymnasium", "gymnasium")


class GymnasiumGame(ReplayedGame[Any]):
    """One environment of Gymnasium.

    An action is a number of the action space, or a name of `action_names`. The environment is reset with the seed of
    the row, and everything that follows is drawn with the seed of the episode.

    Args:
        config: the section `env.gymnasium`.

    Raises:
        ConfigError: there is no such environment, its actions are not discrete, or the names do not fit.
    """

    def __init__(self, config: GymnasiumConfig) -> None:
        super().__init__()
        self._config = config
        env = self._make()
        self._actions = self._action_numbers(env)
        env.close()

    def open_game(self, seed: int, episode_seed: int) -> tuple[Any, str]:
        """Make the environment and reset it."""
        env = self._make()
        observation, _ = env.reset(seed=seed)
        env.unwrapped.np_random, _ = gymnasium.utils.seeding.np_random(episode_seed)
        actions = ", ".join(self._actions)
        text = self._config.instructions or f"You play {self._config.id}."
        advice = f"Actions: {actions}. Answer with one action, for example <action>{next(iter(self._actions))}</action>"
        return env, f"{text}\n{advice}\n{self._text(env, observation)}"

    def act(self, handle: Any, action: str) -> GameAnswer:
        """Take one step."""
        if action not in self._actions:
            return GameAnswer(f"Invalid action: {action[:40]}", 0.0, False, is_valid=False)
        observation, reward, terminated, truncated, _ = handle.step(self._actions[action])
        return GameAnswer(self._text(handle, observation), float(reward), bool(terminated or truncated), is_valid=True)

    def close_game(self, handle: Any) -> None:
        """Close the environment."""
        handle.close()

    def _make(self) -> Any:
        config = self._config
        try:
            return gymnasium.make(config.id, render_mode="ansi" if config.rendered else None, **config.kwargs)
        except (gymnasium.error.Error, TypeError, ValueError) as error:
            raise ConfigError(
                f"env.gymnasium.id={config.id!r} with kwargs={config.kwargs} cannot be made: {error}"
            ) from None

    def _action_numbers(self, env: Any) -> dict[str, int]:
        space, names = env.action_space, self._config.action_names
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ConfigError(f"env.gymnasium.id={self._config.id!r} has actions {space}; text needs discrete ones.")
        numbers = [int(space.start) + number for number in range(int(space.n))]
        names = [str(number) for number in numbers] if names is None else names
        if len(names) != len(numbers) or len(set(names)) != len(names):
            raise ConfigError(
                f"env.gymnasium.action_names has {len(set(names))} different names; {self._config.id} has "
                f"{len(numbers)} actions."
            )
        return dict(zip(names, numbers, strict=True))

    def _text(self, env: Any, observation: Any) -> str:
        return observed(str(env.render() if self._config.rendered else observation).strip())


class GymnasiumEnvironment(GameEnvironment):
    """The environment `gymnasium`, whose rewards are those of the Gymnasium environment.

    Args:
        cfg: `env.gymnasium`.
    """

    config_class = GymnasiumConfig

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        config = GymnasiumConfig.build(**cfg)
        self._games = GymnasiumGame(config)
        super().__init__(self._games, config.max_moves)

    @classmethod
    def check_section(cls, section: Mapping[str, Any], place: str, tokenizer: "TokenizerType | None" = None) -> None:
        """Check the section by making the game once (`EnvironmentInterface.check_section`)."""
        GymnasiumGame(GymnasiumConfig.build(**section))

    def shutdown(self) -> None:
        """Close all games."""
        self._games.close_all()
