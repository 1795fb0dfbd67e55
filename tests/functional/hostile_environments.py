"""An environment that harms its process, its machine or its caller, as the answer of the policy says."""

import mmap
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import torch

from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, EpisodeStart

_MIB = 1 << 20


class Hostile(EnvironmentInterface[dict]):
    """Rewards 1, after it has done what the last message or the episode's metadata names."""

    def __init__(self, cfg: dict):
        self.folder = Path(cfg["folder"])
        self.leak: list[mmap.mmap] = []

    def open_episode(self, metadata: dict) -> EpisodeStart[dict]:
        self._do(metadata.get("open", ""))
        return EpisodeStart(metadata)

    def close_episode(self, metadata: dict) -> None:
        self._do(metadata.get("close", ""))

    def step(self, message_log_batch: list[Any], metadata: list[dict]) -> EnvironmentReturn[dict]:
        replies = [self._do(log[-1]["content"]) for log in message_log_batch]
        count = len(replies)
        columns: dict[str, Any] = {
            "observations": [{"role": "environment", "content": "done"}] * count,
            "metadata": list(metadata),
            "next_stop_strings": [None] * count,
            "rewards": torch.ones(count),
            "terminateds": torch.ones(count, dtype=torch.bool),
        }
        for row, reply in enumerate(replies):
            if reply == "nan":
                columns["rewards"][row] = float("nan")
            elif reply == "wrong shape":
                columns["rewards"] = torch.ones(count + 1)
            elif reply == "lock":
                columns["metadata"][row] = {"lock": threading.Lock()}
            elif reply == "no message":
                columns["observations"][row], columns["terminateds"][row] = 13, False
        return EnvironmentReturn(**columns)

    def _do(self, deed: str) -> str:
        if deed == "raise":
            raise ValueError("I do not like this answer")
        if deed == "exit":
            raise SystemExit(3)
        if deed == "interrupt":
            raise KeyboardInterrupt
        if deed == "hang":
            time.sleep(3600)
        if deed == "print":
            for _ in range(1024):
                print("x" * _MIB)
        if deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if deed == "leak":
            self._allocate(2048)
        if deed == "drip":
            self._allocate(24)
        if deed in ("fork", "fork and hang"):
            self._start_daemon()
        if deed == "fork and hang":
            time.sleep(3600)
        return deed

    def _allocate(self, mebibytes: int) -> None:
        for _ in range(mebibytes // 8):
            self.leak.append(mmap.mmap(-1, 8 * _MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            self.leak[-1].write(b"x" * 8 * _MIB)
            time.sleep(0.01)

    def _start_daemon(self) -> None:
        """Start a process with its own session, whose parent ends at once, as daemons do."""
        note = self.folder / "daemons"
        script = f"(setsid sleep 3600 & echo $! >> {note})"
        subprocess.run(["sh", "-c", script], check=True)


class Pooled(EnvironmentInterface[dict]):
    """Keeps the state of its episodes in the process; a turn may block."""

    pooled = True

    def __init__(self, cfg: dict):
        self.turns: dict[int, int] = {}

    def open_episode(self, metadata: dict) -> EpisodeStart[dict]:
        self.turns[metadata["number"]] = 0
        return EpisodeStart({**metadata, "pid": os.getpid(), "open": len(self.turns)})

    def step(self, message_log_batch: list[Any], metadata: list[dict]) -> EnvironmentReturn[dict]:
        for state in metadata:
            self.turns[state["number"]] += 1
            time.sleep(state.get("wait_s", 0.0))
        count = len(metadata)
        return EnvironmentReturn(
            [{"role": "environment", "content": "next"}] * count,
            [{**state, "stepped_by": os.getpid()} for state in metadata],
            [None] * count,
            torch.tensor([float(self.turns[state["number"]]) for state in metadata]),
            torch.zeros(count, dtype=torch.bool),
        )

    def close_episode(self, metadata: dict) -> None:
        del self.turns[metadata["number"]]
