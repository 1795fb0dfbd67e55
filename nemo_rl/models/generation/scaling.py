"""Let engines leave and join while a run goes on, as many as a file says.

    follow()   before each sync: read the file
                 fewer: the last engines get no more requests, and answer those that they have
                 more: the first engines that left are built again, in the background
    change()   in the sync: end engines that have left and have no request; let engines that are built take part
    opened()   after the sync: engines that joined have the weights and get requests

The bundles of engines that left stay reserved for them. Invariants: the engines that take part are always the first
ones, so their ranks have no gap; no engine gets a request before it has weights, and none ends with one.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from nemo_rl.distributed.worker_groups import RayWorkerGroup
from nemo_rl.files.regular_file import read_text
from nemo_rl.host.background import in_background
from nemo_rl.models.generation.members import Member, Speed

logger = logging.getLogger(__name__)


class EngineScaling:
    """Keeps the number of engines at the one in a file.

    Args:
        file: holds one number; without a file all engines run.
        members: all engines of the run; they run at first.
        workers: their processes.
        setup_timeout_s: seconds that new engines may take to start.
    """

    def __init__(self, file: Path, members: Sequence[Member], workers: RayWorkerGroup, setup_timeout_s: float):
        self.num_changes = 0
        """How often engines left or joined."""
        self._file = file
        self._members = members
        self._workers = workers
        self._setup_timeout_s = setup_timeout_s
        self._text = ""
        self._wanted = len(members)
        self._may_start = True
        self._started: list[Member] = []
        self._start: Future[None] | None = None
        self._was_leaving: set[int] = set()
        self._joined: list[Member] = []

    def follow(self) -> None:
        """Read the file, and let engines begin to leave or to join."""
        self._read()
        self._was_leaving = {member.index for member in self._members if member.is_leaving}
        for member in self._members:
            member.is_leaving = not member.is_away and member.index >= self._wanted
        missing = [member for member in self._members if member.is_away and member.index < self._wanted]
        if missing and self._start is None and self._may_start:
            ranks = [rank for member in missing for rank in member.ranks]
            logger.info("Starting generation engines %s.", [member.index for member in missing])
            build = partial(self._workers.restart_workers, ranks, self._setup_timeout_s)
            self._started, self._start = missing, in_background(build, "engines that join")

    def change(self) -> None:
        """End engines that are done, and let engines that are built take part; no other thread uses the engines."""
        for member in reversed(self._members):
            if member.is_away:
                continue
            # One that began to leave just now may be getting its last request in the thread of the requests.
            if not member.is_leaving or member.unfinished or member.index not in self._was_leaving:
                break
            self._workers.end_workers(member.ranks)
            member.is_away, member.is_leaving = True, False
            self._changed(f"Generation engine {member.index} has left")
        if self._start is not None and self._start.done():
            self._join(self._start)

    def _join(self, start: "Future[None]") -> None:
        joining, self._started, self._start = self._started, [], None
        failure = start.exception()
        if failure is not None:
            self._may_start = False  # until the file changes
            logger.warning("Generation engines could not join: %s", failure)
            return
        for member in joining:
            member.is_away, member.is_down = False, True
            member.num_starts += 1
            member.speed = Speed()
            self._joined.append(member)
            self._changed(f"Generation engine {member.index} joins")

    def opened(self) -> None:
        """Let engines that joined get requests; they have the current weights."""
        for member in self._joined:
            member.is_down = False
        self._joined.clear()

    def _changed(self, event: str) -> None:
        self.num_changes += 1
        count = sum(not member.is_away for member in self._members)
        logger.info("%s; engines: %d of %d.", event, count, len(self._members))

    def _read(self) -> None:
        """Read the wanted number; a wrong one is reported once and changes nothing."""
        try:
            text = read_text(self._file).strip()
        except FileNotFoundError:
            text = str(len(self._members))
        if not text or text == self._text:
            return  # an empty file is being written
        self._text, self._may_start = text, True
        if text.isdecimal() and 1 <= int(text) <= len(self._members):
            self._wanted = int(text)
        else:
            logger.warning(
                "%s (policy.generation.num_engines_file) holds %r; write one number from 1 to %d, the engines that the "
                "run has room for. It keeps %d.",
                self._file,
                text[:50],
                len(self._members),
                self._wanted,
            )
