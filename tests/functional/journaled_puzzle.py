"""The sliding puzzle with a journal of its episodes, which shows what a kill interrupted."""

import time
from pathlib import Path
from typing import Any

from nemo_rl.environments.interfaces import EnvironmentReturn, EpisodeStart
from nemo_rl.kits.games.sliding_puzzle import SlidingPuzzleEnv
from nemo_rl.kits.games.text_game import GameMetadata

STEP_S = 0.1
"""Seconds of a step, so that a test can kill a run between two turns."""


class JournaledPuzzle(SlidingPuzzleEnv):
    """Appends `open`, `turn N` (from 1) and `end` for each episode to the file `journal`."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__(cfg["cfg"])
        self._journal = Path(cfg["journal"])

    def open_episode(self, metadata: Any) -> EpisodeStart[GameMetadata]:
        self._write(["open"])
        return super().open_episode(metadata)

    def step(self, message_log_batch: list[Any], metadata: list[GameMetadata]) -> EnvironmentReturn[GameMetadata]:
        time.sleep(STEP_S)
        turns = super().step(message_log_batch, metadata)
        for after in turns.metadata:
            self._write([f"turn {after['num_moves']}"] + ["end"] * (after["result"] is not None))
        return turns

    def _write(self, events: list[str]) -> None:
        with self._journal.open("a") as journal:
            journal.writelines(f"{event}\n" for event in events)
