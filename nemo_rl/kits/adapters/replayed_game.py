"""Play games whose state is an object of another library, which cannot be stored and is restored by replaying actions.

The metadata of an episode holds its seeds and actions. A game that is open in this process continues. After a restart,
the game is opened again with the same seeds, and its actions are taken again. Invariant: the numbers that a game draws
from the global generators of Python and NumPy depend only on the episode's seed and the number of the action.
"""

import random
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import numpy as np

from nemo_rl.kits.games.text_game import GameStart, GameTurn, TextGame
from nemo_rl.utils.seed import derive_seed

MAX_OPEN = 4096
"""Number of games that are kept open. The least recently used game is closed, and replayed when it is needed again."""


class GameAnswer(NamedTuple):
    """Answer of a game of another library to one action."""

    text: str
    """Text for the model."""
    reward: float
    """Reward of this action."""
    is_over: bool
    """Whether the game is over."""
    is_valid: bool
    """Whether the rules allow the action."""


class ReplayedGame[Handle](TextGame):
    """A game of another library, which a subclass opens, plays and closes."""

    results: ClassVar[Sequence[str]] = ("finished", "out_of_moves")

    def __init__(self) -> None:
        self._open_games: OrderedDict[tuple[Any, ...], tuple[Handle, int]] = OrderedDict()

    @abstractmethod
    def open_game(self, seed: int, episode_seed: int) -> tuple[Handle, str]:
        """Open a game, and return the game with a text of its rules and its situation."""

    @abstractmethod
    def act(self, handle: Handle, action: str) -> GameAnswer:
        """Take one action."""

    @abstractmethod
    def close_game(self, handle: Handle) -> None:
        """Release a game."""

    def start(self, seed: int, split: str, episode_seed: int) -> GameStart:
        """Open a game. The seeds of different splits differ."""
        state = {"seed": seed, "episode_seed": episode_seed, "actions": []}
        handle, text = self._opened(state)
        self._keep(state, handle)
        return GameStart(state, text)

    def play(self, state: dict[str, Any], action: str) -> GameTurn:
        """Take one action in the game of a state. The game is replayed first if it is not open."""
        handle = self._at(state)
        answer = self._act(handle, state, len(state["actions"]), action)
        after = {**state, "actions": [*state["actions"], action]}
        self._keep(after, handle)
        return GameTurn(after, answer.text, answer.reward, "finished" if answer.is_over else None, answer.is_valid)

    def close(self, state: dict[str, Any]) -> None:
        """Close the game of a state if it is open."""
        handle, _ = self._open_games.pop(_key(state), (None, 0))
        if handle is not None:
            self.close_game(handle)

    def close_all(self) -> None:
        """Close all games."""
        while self._open_games:
            _, (handle, _) = self._open_games.popitem()
            self.close_game(handle)

    def _at(self, state: dict[str, Any]) -> Handle:
        handle, num_actions = self._open_games.pop(_key(state), (None, -1))
        if handle is not None and num_actions == len(state["actions"]):
            return handle
        if handle is not None:
            self.close_game(handle)
        handle, _ = self._opened(state)
        for number, action in enumerate(state["actions"]):
            self._act(handle, state, number, action)
        return handle

    def _opened(self, state: dict[str, Any]) -> tuple[Handle, str]:
        with _global_seeds(derive_seed(state["seed"], "start")):
            return self.open_game(state["seed"], state["episode_seed"])

    def _act(self, handle: Handle, state: dict[str, Any], number: int, action: str) -> GameAnswer:
        with _global_seeds(derive_seed(state["episode_seed"], "action", number)):
            return self.act(handle, action)

    def _keep(self, state: dict[str, Any], handle: Handle) -> None:
        self._open_games[_key(state)] = (handle, len(state["actions"]))
        if len(self._open_games) > MAX_OPEN:
            _, (oldest, _) = self._open_games.popitem(last=False)
            self.close_game(oldest)


def _key(state: dict[str, Any]) -> tuple[int, int]:
    return state["seed"], state["episode_seed"]


@contextmanager
def _global_seeds(seed: int) -> Iterator[None]:
    """Seed the global generators of Python and NumPy, and restore their state at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
