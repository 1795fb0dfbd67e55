"""Let worker 0 of an engine call the other workers of it, and end them together."""

import asyncio
import logging
import os
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from nemo_rl.models.generation.ranks.links import Call, Link, Outcome

logger = logging.getLogger(__name__)

_PATIENCE_S = 2.0
"""Seconds until the death of a rank is noticed after it has interrupted another rank's call."""


@contextmanager
def ending_if_alone(links: Sequence[Link]) -> Iterator[None]:
    """Run a block; if it fails because a process at the other end of a link is gone, end this process too."""
    try:
        yield
    except Exception:
        for link in links:
            link.end_if_alone(_PATIENCE_S)
        raise


class ServedRank:
    """Workers 1, 2 ... of an engine: an `Engine` that executes the calls of worker 0.

    Calls run between two callbacks of the event loop, like the engine's steps in worker 0. A subclass loads weights,
    and overrides the other methods of `Engine` that worker 0 does not do for all ranks.
    """

    def serve(self, link: Link, execute: Callable[[Call], Any]) -> None:
        """Tell the other end of a link that this process is ready, and execute its calls from now on."""
        link.send(Outcome(None))
        link.when_it_brings(asyncio.get_running_loop(), partial(self._do_next, link, execute))

    def _do_next(self, link: Link, execute: Callable[[Call], Any]) -> None:
        call: Call = link.receive()
        try:
            outcome = Outcome(execute(call))
        except Exception:  # boundary: worker 0 gets the error, or sees that this rank is gone
            outcome = Outcome(None, traceback.format_exc())
        if call.wants_answer or outcome.failure is not None:
            link.send(outcome)
        if not call.wants_answer and outcome.failure is not None:
            # Worker 0 has usually failed too and reports why. If it waits for this rank instead, only an exit releases
            # it.
            logger.error("A step failed, so this process ends.\n%s", outcome.failure)
            asyncio.get_running_loop().call_later(2 * _PATIENCE_S, os._exit, 1)

    async def generate(self, request_id: str, request: GenerationRequest) -> GenerationResult:
        """See `Engine.generate`; requests go to worker 0."""
        raise NotImplementedError("Requests go to worker 0 of an engine.")

    async def abort(self, request_ids: Collection[str]) -> None:
        """See `Engine.abort`."""

    async def begin_weight_update(self) -> None:
        """See `Engine.begin_weight_update`."""

    async def finish_weight_update(self, version: int) -> list[str]:
        """See `Engine.finish_weight_update`; the default lets worker 0 report missing tensors of all ranks."""
        return []

    async def layer_outputs(self, token_ids: list[int]) -> list[torch.Tensor]:
        """See `Engine.layer_outputs`."""
        return []

    async def sleep(self) -> None:
        """See `Engine.sleep`."""

    async def wake_up(self) -> None:
        """See `Engine.wake_up`."""
