"""Share the models among users.

Invariants: the model that was served longest ago is next, and no model has two turns at the same time. A turn has the
commands up to the next update, at most `MOST_OF_A_TURN`.
"""

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from nemo_rl.serving.store.tenants import Tenant

MOST_OF_A_TURN = 64
"""Largest number of commands of one turn."""


class TurnTable:
    """Models of clients with commands, in the order of their turns."""

    def __init__(self) -> None:
        self._queue: OrderedDict[str, Tenant] = OrderedDict()
        self._has_work = asyncio.Event()
        self._playing: set[str] = set()
        """Ids of the models whose turn it is. They join the end of the queue after their turn."""

    def announce(self, tenant: Tenant) -> None:
        """Add a model to the end of the queue, unless it waits already or has nothing to do."""
        if tenant.has_work and tenant.id not in self._playing and tenant.id not in self._queue:
            self._queue[tenant.id] = tenant
            self._has_work.set()

    async def take(self) -> Tenant:
        """Wait for a model with commands, and return the one whose turn it is."""
        while not self._queue:
            self._has_work.clear()
            await self._has_work.wait()
        return self._queue.popitem(last=False)[1]

    async def play(self, tenant: Tenant, execute: Callable[[Tenant], Awaitable[str]]) -> None:
        """Execute the commands of one turn.

        Args:
            execute: function that executes the next command and returns its kind.
        """
        self._playing.add(tenant.id)
        try:
            for _ in range(MOST_OF_A_TURN):
                if not tenant.has_work or await execute(tenant) == "optim_step":
                    break
        finally:
            self._playing.remove(tenant.id)
        self.announce(tenant)


@dataclass
class FairGate:
    """Limit of what runs at the same time, shared among users in equal turns.

    A user who waits gets a place before another user gets two.
    """

    places: int
    """Number of places."""
    _waiting: "OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]]" = field(default_factory=OrderedDict)
    """Requests of each user, with the number of places that each needs. The user whose turn is next comes first."""
    _taken: int = 0

    @contextlib.asynccontextmanager
    async def place(self, user: str, number: int = 1) -> AsyncIterator[None]:
        """Wait for places, and hold them during a block.

        Args:
            user: who waits.
            number: of places. More than there are count as all.
        """
        needed = min(number, self.places)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(user, deque()).append((needed, turn))
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(needed)
            raise
        try:
            yield
        finally:
            self._leave(needed)

    def _leave(self, number: int) -> None:
        self._taken -= number
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting:
            user, requests = next(iter(self._waiting.items()))
            needed, turn = requests[0]
            if not turn.done() and self._taken + needed > self.places:
                return
            requests.popleft()
            del self._waiting[user]
            if requests:
                self._waiting[user] = requests  # the last one now
            if not turn.done():
                self._taken += needed
                turn.set_result(None)
