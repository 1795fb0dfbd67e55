"""An engine of several processes as one `Engine`, for the conformance suite; the functions run in these processes."""

import asyncio
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch

from nemo_rl.commands.conformance import Case, check_property

_STOP = "stop"
_DEADLINE_S = 60.0


async def serve_calls(engine: Any, address: str) -> None:
    """Make the calls of `check_over_ranks` on this rank's engine, until they end."""
    with await _connected(address) as pipe:
        while True:
            method, args = await asyncio.to_thread(pipe.recv)
            if method == _STOP:
                return
            try:
                pipe.send((True, await getattr(engine, method)(*args)))
            except Exception as error:
                pipe.send((False, repr(error)))


async def check_over_ranks(engine: Any, addresses: Sequence[str], case: Case, name: str) -> None:
    """Check a property of the engine whose first rank is in this process."""
    with_all = EngineOverRanks(engine, [await asyncio.to_thread(_accepted, address) for address in addresses])
    try:
        await check_property(with_all, case, name)
    finally:
        with_all.stop()


async def _connected(address: str) -> Connection:
    async with asyncio.timeout(_DEADLINE_S):
        while True:
            try:
                return Client(address)
            except (FileNotFoundError, ConnectionRefusedError):  # the other side is not there yet
                await asyncio.sleep(0.02)


def _accepted(address: str) -> Connection:
    with Listener(address) as listener:
        return listener.accept()


class EngineOverRanks:
    """Gives requests to the first rank, and weights to all of them, as the controller does.

    Everything that is not defined here is the first rank's own.
    """

    def __init__(self, first: Any, pipes: Sequence[Connection]) -> None:
        self._first, self._pipes = first, pipes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)

    async def begin_weight_update(self) -> None:
        await self._on_all("begin_weight_update")

    async def load_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        await self._on_all("load_tensors", tensors)

    async def finish_weight_update(self, version: int) -> list[str]:
        of_ranks = await self._on_all("finish_weight_update", version)
        return sorted({name for names in of_ranks for name in names})

    async def layer_outputs(self, token_ids: list[int]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = (await self._on_all("layer_outputs", token_ids))[0]
        return found

    async def sleep(self) -> None:
        await self._on_all("sleep")

    async def wake_up(self) -> None:
        await self._on_all("wake_up")

    async def _on_all(self, method: str, *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((method, args))
        of_others = [asyncio.to_thread(pipe.recv) for pipe in self._pipes]
        first, *others = await asyncio.gather(getattr(self._first, method)(*args), *of_others, return_exceptions=True)
        if isinstance(first, BaseException):
            raise first
        for answer in others:
            if isinstance(answer, BaseException):
                raise answer
            worked, value = answer
            if not worked:
                raise RuntimeError(value)
        return [first, *(value for _, value in others)]

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.send((_STOP, ()))
            pipe.close()
