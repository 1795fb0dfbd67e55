"""Weights that come while a response is drawn, or before it is read again: which of them gave its log-probabilities."""

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, Grammar, SamplingParams
from nemo_rl.models.generation.stepped import Finished, SteppedEngine

pytestmark = pytest.mark.fast

FORM = Grammar("regex", "a+")


class Reading(SteppedEngine):
    """Draws one token in each of three steps, and reads a response with a grammar in the fourth one."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[str, int] = {}
        self.again: set[str] = set()

    def add_request(self, request_id: str, request: GenerationRequest) -> None:
        self.drawn[request_id] = 0
        if request.sampling.is_read_again:
            self.again.add(request_id)

    def step(self) -> list[Finished]:
        finished = []
        for request_id, count in list(self.drawn.items()):
            if count < 3:
                self.drawn[request_id] += 1
            if self.drawn[request_id] == 3 and (count == 3 or request_id not in self.again):
                del self.drawn[request_id]
                finished.append(Finished(request_id, [1, 2, 3], [-1.0] * 3, "stop"))
        return finished

    def num_tokens(self, request_id: str) -> int:
        return self.drawn[request_id]

    def sampled_so_far(self, request_id: str) -> tuple[list[int], list[float]]:
        return [], []

    def remove_requests(self, request_ids: Collection[str]) -> list[Finished]:
        return []

    def start_loading(self) -> None:
        pass

    def finish_loading(self, *, changed: bool) -> list[str]:
        return []

    async def load_tensors(self, tensors: Any) -> None:
        pass

    async def layer_outputs(self, token_ids: list[int]) -> list[Any]:
        return []

    async def sleep(self) -> None:
        pass

    async def wake_up(self) -> None:
        pass


async def played(updates: Collection[int], grammar: Grammar | None) -> GenerationResult:
    """Draw a response; the weights become version 10 + n after n tokens, for each n of `updates`; 3: before reading."""
    engine = Reading()
    answer = engine.generate("one", GenerationRequest([7], SamplingParams(grammar=grammar), seed=0))
    for count in range(4):
        if count in updates:
            await engine.begin_weight_update()
            await engine.finish_weight_update(10 + count)
        while not answer.done() and engine.drawn["one"] == count:
            reading = count == 3
            await asyncio.sleep(0)
            if reading:
                break
    return await answer


@pytest.mark.parametrize(
    ("updates", "grammar", "spans", "scored_by", "later"),
    [
        ((), FORM, [(0, 0)], 0, 0),
        ((1,), FORM, [(0, 0), (1, 11)], 11, 1),
        ((3,), FORM, [(0, 0)], 13, 3),
        ((2, 3), FORM, [(0, 0), (2, 12)], 13, 3),
        ((2,), None, [(0, 0), (2, 12)], None, 0),
    ],
)
def test_tokens_that_newer_weights_scored_are_counted(
    updates: Collection[int], grammar: Grammar | None, spans: list[Any], scored_by: int | None, later: int
) -> None:
    result = asyncio.run(asyncio.wait_for(played(updates, grammar), 10))
    assert result.weight_versions == spans
    assert (result.scored_by, result.num_scored_later) == (scored_by, later)
