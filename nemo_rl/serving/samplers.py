"""Hold samplers in memory, and load them from their folders when requests need them.

Invariants: a name of a sampler is never used again, so engines cannot confuse cached keys and values of two samplers.
A sampler that answers a request stays until the answer is complete.
"""

import asyncio
import contextlib
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from nemo_rl.serving.interfaces import AdapterModels


@dataclass(eq=False)
class _Resident:
    """Sampler in memory."""

    name: str
    """Name in the models."""
    users: int = 0
    """Number of requests that it answers."""


@dataclass(eq=False)
class SamplerPool:
    """Samplers by their folders, the one that was used longest ago first."""

    models: AdapterModels
    """The models."""
    most: int
    """Largest number of samplers in memory, unless more are in use at the same time."""
    _residents: OrderedDict[Path, _Resident] = field(default_factory=OrderedDict)
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def new_name(self) -> str:
        """Return a name that was never used."""
        return f"sampler-{next(self._numbers)}"

    async def adopt(self, folder: Path, name: str) -> None:
        """Hold a sampler that is in memory already.

        Args:
            folder: from which it could be loaded.
            name: that `new_name` has returned.
        """
        async with self._lock:
            self._residents[folder] = _Resident(name)
            await self._make_room()

    @contextlib.asynccontextmanager
    async def use(self, folder: Path | None) -> AsyncIterator[str | None]:
        """Give the name of a sampler for the time of a block.

        Args:
            folder: of the sampler, or None for the base model, which has no name.
        """
        if folder is None:
            yield None
            return
        resident = await self._loaded(folder)
        try:
            yield resident.name
        finally:
            resident.users -= 1

    async def forget(self, below: Path) -> None:
        """Drop the samplers whose folders are below a folder."""
        async with self._lock:
            for folder, resident in list(self._residents.items()):
                if folder.is_relative_to(below) and not resident.users:
                    del self._residents[folder]
                    await self.models.drop_sampler(resident.name)

    async def _loaded(self, folder: Path) -> _Resident:
        """Return a sampler, and note that it is used once more."""
        async with self._lock:
            resident = self._residents.get(folder)
            if resident is None:
                resident = _Resident(self.new_name())
                await self.models.load_sampler(resident.name, folder)
                self._residents[folder] = resident
            self._residents.move_to_end(folder)
            resident.users += 1
            await self._make_room()
            return resident

    async def _make_room(self) -> None:
        free = [folder for folder, resident in self._residents.items() if not resident.users]
        for folder in free[: max(0, len(self._residents) - self.most)]:
            await self.models.drop_sampler(self._residents.pop(folder).name)
