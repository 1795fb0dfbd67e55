"""Play a text game with a model: one action in each turn, between `<action>` and `</action>`.

    open_episode: TextGame.start(seed) ─► first message of the prompt
    step:         text of the turn ─► action ─► TextGame.play(state, action) ─► message, reward, end

Invariant: an episode is a function of its seeds and actions. Its whole state is in the metadata, so a process that died
can be replaced in the middle of a game, and a resumed run repeats every episode.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired, TypedDict

import torch

from nemo_rl.data.messages.content import content_text, texts_between
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, EpisodeStart

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import LLMMessageLogType
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

ACTION_END = "</action>"

TRUNCATED = "truncated"
"""Name of the metric that counts episodes that a limit of tokens or turns cut off."""


class GameMetadata(TypedDict):
    """State of an episode, beginning with `open_episode`."""

    game_state: dict[str, Any]
    """State of the game, made of plain values."""
    num_moves: int
    """Number of actions so far, valid or not."""
    max_moves: int | None
    """Number of actions after which the episode ends, or None for no limit."""
    invalid_actions: NotRequired[int]
    """Number of turns without an action that the rules allow."""
    result: NotRequired[str | None]
    """Result of the game, which is one of `TextGame.results`, or None before its end."""


@dataclass(frozen=True)
class GameStart:
    """Beginning of a game."""

    state: dict[str, Any]
    """State, made of plain values."""
    text: str
    """Rules and situation, for the prompt."""


@dataclass(frozen=True)
class GameTurn:
    """Effect of one action."""

    state: dict[str, Any]
    """State after the action."""
    text: str
    """Answer to the model."""
    reward: float = 0.0
    """Reward of this action."""
    result: str | None = None
    """Result of the game, which is one of `TextGame.results`, or None if the game continues."""
    is_valid: bool = True
    """Whether the rules allow the action."""


class TextGame(ABC):
    """Rules of a game for one player."""

    results: ClassVar[Sequence[str]] = ("solved", "failed")
    """Results of a game, which are also names of metrics. The last one is the result of a player whose moves are used
    up, and who gets `out_of_moves_reward`."""
    out_of_moves_reward: ClassVar[float] = 0.0
    """Reward for the move with which the player's moves are used up."""

    @abstractmethod
    def start(self, seed: int, split: str, episode_seed: int) -> GameStart:
        """Set up a game.

        Args:
            seed: seed of the situation at the start, the same for all samples of a prompt.
            split: "train" or "validation", whose situations differ.
            episode_seed: seed of all later random events, which differs between samples.
        """

    @abstractmethod
    def play(self, state: dict[str, Any], action: str) -> GameTurn:
        """Take one action without changing `state`."""

    def close(self, state: dict[str, Any]) -> None:  # noqa: B027  (optional hook)
        """Release the resources of a game at the end of its episode."""

    def metrics(self, states: Sequence[GameMetadata]) -> dict[str, float]:
        """Compute metrics of finished episodes in addition to those of all games."""
        return {}


class GameEnvironment(EnvironmentInterface[GameMetadata]):
    """An environment that plays a `TextGame`.

    Rows of the data set `episodes` have the seed of their game. Rows of other data sets may instead have a
    `game_state`, and a prompt that shows this state.

    Args:
        max_moves: number of actions after which an episode ends without success, or None for no limit.
    """

    def __init__(self, game: TextGame, max_moves: int | None = None) -> None:
        self.game = game
        self._max_moves = max_moves

    def open_episode(self, metadata: Any) -> EpisodeStart[GameMetadata]:
        """Set up the game of a sample, and return a first message that shows the game.

        Raises:
            ValueError: the row has neither a seed nor a state.
        """
        given = metadata or {}
        if "game_state" in given:
            return EpisodeStart(_opened(given["game_state"], given.get("max_moves", self._max_moves)))
        if "seed" not in given:
            raise ValueError(
                f"the row has neither the seed of a game nor a game_state, only {', '.join(given) or 'nothing'}. Use "
                "dataset_name: episodes with processor: episode_data_processor, or rows with game_state."
            )
        start = self.game.start(given["seed"], given.get("split", "train"), given["episode_seed"])
        return EpisodeStart(_opened(start.state, self._max_moves), {"role": "environment", "content": start.text})

    def step(
        self, message_log_batch: list["LLMMessageLogType"], metadata: list[GameMetadata]
    ) -> EnvironmentReturn[GameMetadata]:
        """Take one action in each of B games, given the `metadata` of `open_episode` or of the previous step."""
        turns = [
            self._turn(content_text(log[-1]["content"]), item)
            for log, item in zip(message_log_batch, metadata, strict=True)
        ]
        after = [self._after(item, turn) for item, turn in zip(metadata, turns, strict=True)]
        rewards = [
            turn.reward + (self.game.out_of_moves_reward if turn.result != item.get("result") else 0.0)
            for turn, item in zip(turns, after, strict=True)
        ]
        stops: list[list[str] | None] = [[ACTION_END] for _ in turns]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": turn.text} for turn in turns],
            metadata=after,
            next_stop_strings=stops,
            rewards=torch.tensor(rewards),
            terminateds=torch.tensor([item.get("result") is not None for item in after]),
        )

    def close_episode(self, metadata: GameMetadata) -> None:
        """Release the game of a sample."""
        if "game_state" in (metadata or {}):
            self.game.close(metadata["game_state"])

    def global_post_process_and_metrics(
        self, batch: "BatchedDataDict[Any]"
    ) -> tuple["BatchedDataDict[Any]", dict[str, float | int]]:
        """Compute metrics over B episodes without changing their rewards.

        The metrics are the share of each result, the share of truncated episodes (which a limit of tokens or turns cut
        off), the means of `num_moves` and `invalid_actions` over all episodes, and the metrics of the game.
        """
        states: list[GameMetadata] = batch["extra_env_info"]
        ends = [state.get("result") for state in states]
        shares = {result: ends.count(result) / len(ends) for result in self.game.results}
        return batch, {
            **shares,
            TRUNCATED: ends.count(None) / len(ends),
            "num_moves": fmean([state["num_moves"] for state in states]),
            "invalid_actions": fmean([state.get("invalid_actions", 0) for state in states]),
            **self.game.metrics(states),
        }

    def _turn(self, text: str, metadata: GameMetadata) -> GameTurn:
        actions = texts_between(text, "<action>", "</action>")
        if not actions:
            message = "Invalid action: write one action between <action> and </action>."
            return GameTurn(metadata["game_state"], message, is_valid=False)
        return self.game.play(metadata["game_state"], actions[-1].strip())

    def _after(self, before: GameMetadata, turn: GameTurn) -> GameMetadata:
        num_moves, most = before["num_moves"] + 1, before["max_moves"]
        is_over = most is not None and num_moves >= most
        return {
            "game_state": turn.state,
            "num_moves": num_moves,
            "max_moves": most,
            "invalid_actions": before.get("invalid_actions", 0) + (not turn.is_valid),
            "result": self.game.results[-1] if turn.result is None and is_over else turn.result,
        }


def observed(text: str) -> str:
    """Return a situation between tags that separate it from other text."""
    return f"<environment>\n{text}\n</environment>"


def settings_of(cfg: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings of a game, which are the mapping itself or the mapping at its key `cfg`."""
    section = dict(cfg or {})
    return dict(section["cfg"] or {}) if "cfg" in section else section


def _opened(state: dict[str, Any], max_moves: int | None) -> GameMetadata:
    return {"game_state": state, "num_moves": 0, "max_moves": max_moves, "invalid_actions": 0, "result": None}
