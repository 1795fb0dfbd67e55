"""The programs of pipeline stages, as pure data: complete, free of deadlocks, and bounded in memory."""

from itertools import product

import pytest

from nemo_rl.models.dtensor.pipeline.runner import Pass, Program, StageExchange, num_warmup, programs

pytestmark = pytest.mark.fast

SHAPES = list(product((2, 3, 4, 7), (1, 2, 3), (1, 2, 3, 4, 5, 8, 13)))


def _passes(program: Program) -> list[Pass]:
    return [step for step in program if isinstance(step, Pass)]


def _as_text(program: Program) -> str:
    return " ".join(f"{step.kind[0]}{step.chunk}.{step.microbatch}" for step in _passes(program))


@pytest.mark.parametrize("backward", [True, False])
def test_every_chunk_sees_every_microbatch_once(backward) -> None:
    kinds = ("forward", "backward") if backward else ("forward",)
    for stages, per_stage, number in SHAPES:
        for stage, program in enumerate(programs(stages, per_stage, number, backward=backward)):
            passes = _passes(program)
            chunks = range(stage, stages * per_stage, stages)
            assert sorted(passes, key=str) == sorted(
                (Pass(*key) for key in product(kinds, chunks, range(number))), key=str
            )


def test_each_backward_follows_its_forward_and_few_microbatches_are_in_flight() -> None:
    for stages, per_stage, number in SHAPES:
        for stage, program in enumerate(programs(stages, per_stage, number, backward=True)):
            waiting: set[tuple[int, int]] = set()
            for step in _passes(program):
                if step.kind == "forward":
                    waiting.add((step.chunk, step.microbatch))
                else:
                    waiting.remove((step.chunk, step.microbatch))
                assert len(waiting) <= num_warmup(stage, stages, per_stage) + 1
            assert not waiting


def test_the_orders_equal_those_of_the_papers() -> None:
    first, second = programs(2, 1, 3, backward=True)
    assert _as_text(first) == "f0.0 f0.1 b0.0 f0.2 b0.1 b0.2"
    assert _as_text(second) == "f1.0 b1.0 f1.1 b1.1 f1.2 b1.2"
    first, second = programs(2, 2, 2, backward=True)
    assert _as_text(first) == "f0.0 f0.1 f2.0 f2.1 b2.0 b2.1 b0.0 b0.1"
    assert _as_text(second) == "f1.0 f1.1 f3.0 b3.0 f3.1 b3.1 b1.0 b1.1"


class Network:
    """Transfers that block their stage until the peer is at the matching one: the strictest case."""

    def __init__(self, made: list[Program], num_chunks: int) -> None:
        self.made, self.num_chunks = made, num_chunks
        self.at = [0] * len(made)
        self.made_passes: list[set[Pass]] = [set() for _ in made]
        self.got: list[set[Pass]] = [set() for _ in made]

    def run(self) -> None:
        while any(at < len(program) for at, program in zip(self.at, self.made, strict=True)):
            moved = [self._step(stage) for stage in range(len(self.made))]
            assert any(moved), "all stages wait for each other"

    def _step(self, stage: int) -> bool:
        if self.at[stage] == len(self.made[stage]):
            return False
        step = self.made[stage][self.at[stage]]
        if isinstance(step, Pass):
            if step.kind == "backward":
                assert Pass("forward", step.chunk, step.microbatch) in self.made_passes[stage]
            begins = step.chunk == (0 if step.kind == "forward" else self.num_chunks - 1)
            assert begins or step in self.got[stage], "a pass came before what it takes"
            self.made_passes[stage].add(step)
        else:
            peers = self._group_of(stage)
            if peers is None:
                return False
            for peer in peers - {stage}:
                self._hand_on(peer)
                self.at[peer] += 1
            self._hand_on(stage)
        self.at[stage] += 1
        return True

    def _group_of(self, stage: int) -> set[int] | None:
        """Return all stages that a transfer of this exchange waits for, directly or not; None if one is not ready."""
        group, new = {stage}, [stage]
        while new:
            member = new.pop()
            for peer in self._peers(member):
                if member not in self._peers(peer):
                    return None
                if peer not in group:
                    group.add(peer)
                    new.append(peer)
        assert all(self._sent(member) == self._received(member) for member in group)
        return group

    def _peers(self, stage: int) -> set[int]:
        exchange = self._exchange(stage)
        return {transfer.peer for transfer in (*exchange.sends, *exchange.receives)} if exchange else set()

    def _sent(self, stage: int) -> set[tuple[int, Pass]]:
        exchange = self._exchange(stage)
        return {(transfer.peer, transfer.wanted_by) for transfer in exchange.sends} if exchange else set()

    def _received(self, sender: int) -> set[tuple[int, Pass]]:
        """Return what the peers of a stage's exchange receive from it in theirs."""
        return {
            (peer, transfer.wanted_by)
            for peer in self._peers(sender)
            for transfer in getattr(self._exchange(peer), "receives", ())
            if transfer.peer == sender
        }

    def _exchange(self, stage: int) -> StageExchange | None:
        step = self.made[stage][self.at[stage]] if self.at[stage] < len(self.made[stage]) else None
        return step if isinstance(step, StageExchange) else None

    def _hand_on(self, stage: int) -> None:
        exchange = self._exchange(stage)
        assert exchange is not None
        self.got[stage].update(transfer.wanted_by for transfer in exchange.receives)


@pytest.mark.parametrize("backward", [True, False])
def test_transfers_match_without_deadlock(backward) -> None:
    for stages, per_stage, number in SHAPES:
        Network(programs(stages, per_stage, number, backward=backward), stages * per_stage).run()


def test_prefetched_tensors_are_bounded_by_stages_and_chunks() -> None:
    for stages, per_stage, number in SHAPES:
        for backward in (True, False):
            for program in programs(stages, per_stage, number, backward=backward):
                ahead: set[Pass] = set()
                for step in program:
                    if isinstance(step, StageExchange):
                        ahead |= {transfer.wanted_by for transfer in step.receives}
                    else:
                        ahead.discard(step)
                    assert len(ahead) <= stages * per_stage
