"""Pipeline schedules 1F1B and interleaved 1F1B: the order of each stage's passes, sends and receives.

A model's layers are divided into chunks; chunk c belongs to stage c % num_stages. Each stage has a fixed order of
passes. The schedule simulates all stages round by round: in a round every stage makes its next pass if the inputs of
that pass have arrived, and the outputs are sent at the end of the round. So sender and receiver handle a tensor in the
same round, and each stage's transfers are in the order of the rounds.

Invariant: the transfers cannot block each other. A transfer of round t waits only for passes of rounds up to t and for
transfers of earlier rounds, so the earliest unfinished round can always be finished, even if a stage's transfers run
one after another (NCCL). At most `warmup + 1` microbatches wait for their backward pass in a stage.

Sources: Narayanan et al. 2019 (PipeDream, 1F1B); Narayanan et al. 2021, arXiv:2104.04473, section 2.2 (interleaved).
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Pass:
    """One chunk's work on one microbatch."""

    kind: Literal["forward", "backward"]
    chunk: int
    microbatch: int


@dataclass(frozen=True)
class Transfer:
    """A tensor sent from one stage to another."""

    peer: int
    """The stage that receives or sends it."""
    wanted_by: Pass
    """The pass that uses it: hidden states for a forward pass, their gradient for a backward pass."""


@dataclass(frozen=True)
class Exchange:
    """Sends and receives of a stage at the end of one round."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


type Program = list[Pass | Exchange]
"""Passes and exchanges of one stage, in order."""


def programs(num_stages: int, chunks_per_stage: int, num_microbatches: int, *, backward: bool) -> list[Program]:
    """Return the program of every stage.

    Args:
        num_stages: number of stages, at least 2.
        chunks_per_stage: chunks of each stage; above 1 the schedule is interleaved.
        num_microbatches: any number; more microbatches leave less idle time.
        backward: whether every forward pass is followed by its backward pass.
    """
    num_chunks = num_stages * chunks_per_stage
    waiting = [
        deque(_order(stage, num_stages, chunks_per_stage, num_microbatches, backward)) for stage in range(num_stages)
    ]
    made: list[Program] = [[] for _ in waiting]
    done: set[Pass] = set()
    while any(waiting):
        ready = [stage for stage, queue in enumerate(waiting) if queue and _needs(queue[0], num_chunks) <= done]
        assert ready, "the order of passes cannot be carried out"
        ran = {stage: waiting[stage].popleft() for stage in ready}
        for stage, step in ran.items():
            made[stage].append(step)
        for stage, exchange in _exchanges(ran, num_stages, num_chunks).items():
            made[stage].append(exchange)
        done.update(ran.values())
    return made


def num_warmup(stage: int, num_stages: int, chunks_per_stage: int) -> int:
    """Return the number of forward passes before forward and backward passes alternate.

    Without interleaving the last stage needs none.
    """
    later_stages = num_stages - stage - 1
    return later_stages if chunks_per_stage == 1 else 2 * later_stages + (chunks_per_stage - 1) * num_stages


def _order(stage: int, num_stages: int, per_stage: int, num_microbatches: int, backward: bool) -> list[Pass]:
    """Order the passes of a stage: microbatches in groups of `num_stages`, each group through one chunk after another.

    The last group is first filled up to `num_stages`, then passes of microbatches that do not exist are dropped. They
    are dropped in all stages, so the order of the others stays consistent.
    """
    groups = range(0, num_microbatches, num_stages)

    def walk(kind: Literal["forward", "backward"], chunks: list[int]) -> list[Pass]:
        return [
            Pass(kind, chunk * num_stages + stage, group + index)
            for group in groups
            for chunk in chunks
            for index in range(num_stages)
        ]

    passes = walk("forward", list(range(per_stage)))
    if backward:
        back = walk("backward", list(range(per_stage))[::-1])
        warmup = min(num_warmup(stage, num_stages, per_stage), len(passes))
        pairs = zip(passes[warmup:], back, strict=False)
        passes = passes[:warmup] + [one for pair in pairs for one in pair] + back[len(passes) - warmup :]
    return [one for one in passes if one.microbatch < num_microbatches]


def _needs(step: Pass, num_chunks: int) -> set[Pass]:
    """Return the passes that must have been made in an earlier round."""
    if step.kind == "forward":
        return {Pass("forward", step.chunk - 1, step.microbatch)} if step.chunk else set()
    needs = {Pass("forward", step.chunk, step.microbatch)}
    if step.chunk < num_chunks - 1:
        needs.add(Pass("backward", step.chunk + 1, step.microbatch))
    return needs


def _exchanges(ran: dict[int, Pass], num_stages: int, num_chunks: int) -> dict[int, Exchange]:
    """Return each stage's sends and receives after the passes of one round; stages without any are left out."""
    sends: dict[int, list[Transfer]] = {}
    receives: dict[int, list[Transfer]] = {}
    for stage, step in ran.items():
        chunk = step.chunk + (1 if step.kind == "forward" else -1)
        if 0 <= chunk < num_chunks:
            wanted_by, receiver = Pass(step.kind, chunk, step.microbatch), chunk % num_stages
            sends.setdefault(stage, []).append(Transfer(receiver, wanted_by))
            receives.setdefault(receiver, []).append(Transfer(stage, wanted_by))
    return {
        stage: Exchange(tuple(sends.get(stage, ())), tuple(receives.get(stage, ())))
        for stage in sorted(sends.keys() | receives.keys())
    }
