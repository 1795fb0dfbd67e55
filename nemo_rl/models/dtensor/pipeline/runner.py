"""Run the pipeline schedules 1F1B and interleaved 1F1B: a stage's passes, sends and receives in order.

A model's layers are divided into chunks; chunk c belongs to stage c % num_stages. `programs` computes the order of all
stages in advance by simulating rounds. In a round every stage makes its next pass if the inputs of that pass have
arrived, and the outputs are sent at the end of the round. Sender and receiver therefore handle a tensor in the same
round, and each stage's transfers follow the order of rounds.

Invariant: the transfers cannot block each other. A transfer of round t waits only for passes of rounds up to t and for
transfers of earlier rounds, so the earliest unfinished round can always be finished, even if a stage's transfers run
one after another (NCCL). At most `warmup + 1` microbatches wait for their backward pass in a stage.

`Pipeline` runs the program of its stage. All stages have the same microbatches, so each stage can compute the shape of
every tensor it receives. Sends and receives of one round are started together. They are finished before their tensors
are used, and at the latest when two more rounds of this stage have been started, which limits the tensors in transit.
This module does not scale losses, so gradients are sums over microbatches.

Sources: Narayanan et al. 2019 (PipeDream, 1F1B); Narayanan et al. 2021, arXiv:2104.04473, section 2.2 (interleaved).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import P2POp, batch_isend_irecv

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.ranks.process_group import collective_timeout
from nemo_rl.models.dtensor.mesh import Meshes
from nemo_rl.models.dtensor.parallelize import ShardableModel, reshard
from nemo_rl.models.dtensor.pipeline.stages import PipelineStage, active, stage_of
from nemo_rl.models.huggingface.load import torch_dtype
from nemo_rl.models.training.inputs import ModelInputs
from nemo_rl.models.training.interfaces import ForwardStep


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
    """Number of the other stage."""
    wanted_by: Pass
    """The pass that uses the tensor: hidden states for a forward pass, their gradient for a backward pass."""


@dataclass(frozen=True)
class StageExchange:
    """Send and receives of a stage at the end of one round."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


type Program = list[Pass | StageExchange]
"""Passes and exchanges of one stage, in order."""


def programs(num_stages: int, chunks_per_stage: int, num_microbatches: int, *, backward: bool) -> list[Program]:
    """Return the program of every stage.

    Args:
        num_stages: number of stages, at least 2.
        chunks_per_stage: chunks of each stage; above 1 the schedule is interleaved.
        num_microbatches: any number; with more microbatches, there is less idle time.
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
    """Return the number of forward passes of a stage before forward and backward passes alternate."""
    later_stages = num_stages - stage - 1
    return later_stages if chunks_per_stage == 1 else 2 * later_stages + (chunks_per_stage - 1) * num_stages


def _order(stage: int, num_stages: int, per_stage: int, num_microbatches: int, backward: bool) -> list[Pass]:
    """Return the passes of a stage in order. Groups of `num_stages` microbatches pass through all chunks of the stage.

    The order is computed as if the last group were full. Then all stages drop the passes of microbatches that do not
    exist, so that they agree on the order of the remaining passes.
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
    """Return the passes that must be finished in an earlier round than this pass."""
    if step.kind == "forward":
        return {Pass("forward", step.chunk - 1, step.microbatch)} if step.chunk else set()
    needs = {Pass("forward", step.chunk, step.microbatch)}
    if step.chunk < num_chunks - 1:
        needs.add(Pass("backward", step.chunk + 1, step.microbatch))
    return needs


def _exchanges(ran: dict[int, Pass], num_stages: int, num_chunks: int) -> dict[int, StageExchange]:
    """Return each stage's sends and receives after one round. Stages without transfers are left out."""
    sends: dict[int, list[Transfer]] = {}
    receives: dict[int, list[Transfer]] = {}
    for stage, step in ran.items():
        chunk = step.chunk + (1 if step.kind == "forward" else -1)
        if 0 <= chunk < num_chunks:
            wanted_by, receiver = Pass(step.kind, chunk, step.microbatch), chunk % num_stages
            sends.setdefault(stage, []).append(Transfer(receiver, wanted_by))
            receives.setdefault(receiver, []).append(Transfer(stage, wanted_by))
    return {
        stage: StageExchange(tuple(sends.get(stage, ())), tuple(receives.get(stage, ())))
        for stage in sorted(sends.keys() | receives.keys())
    }


type Score = Callable[[ModelInputs], tuple[Tensor, Tensor]]
"""Function that computes the scores of a microbatch. Model inputs may hold hidden states as `inputs_embeds`."""
type Enter = Callable[[ModelInputs], None]
"""Function that prepares a pass of one microbatch. Backward passes are included, as they may recompute the forward."""

_ROUNDS_ON_THE_WAY = 2


@dataclass(frozen=True)
class HiddenStates:
    """Shape and dtype of the tensors between stages: local tensors `[b, T / token_parts, width]`."""

    width: int
    """The model's hidden size."""
    dtype: torch.dtype
    """Dtype of the layers' outputs."""
    token_parts: int = 1
    """Number of ranks that divide the tokens between layers (sequence parallelism)."""

    def shape(self, inputs: ModelInputs) -> tuple[int, int, int]:
        """Return the shape for a microbatch, which has only this rank's tokens with context parallelism."""
        rows, tokens = inputs.model_inputs["input_ids"].shape
        return rows, tokens // self.token_parts, self.width

    def empty(self, inputs: ModelInputs, device: torch.device) -> Tensor:
        """Return a new tensor in which a microbatch's hidden states can be received."""
        return torch.empty(self.shape(inputs), dtype=self.dtype, device=device)


class Pipeline:
    """Run microbatches through the stages.

    Args:
        model: the wrapped model after `cut`, sharded.
        stage: the part of the model that this rank holds.
        hidden: shape and dtype of the tensors that stages exchange.
        score: called in the last stage for the last chunk.
        enter: called before each forward and backward pass of this stage.
    """

    def __init__(
        self, model: ShardableModel, stage: PipelineStage, hidden: HiddenStates, score: Score, enter: Enter
    ) -> None:
        self.model, self.stage, self.hidden, self.score, self.enter = model, stage, hidden, score, enter
        device = stage.place.device
        # # On GPUs, a wait with a time limit would block the host. The group's watchdog enforces the limit instead.
        self.limit = collective_timeout(device) if device.type == "cpu" else None
        # All ranks of an NCCL group must take part in its first communication.
        dist.all_reduce(torch.zeros(1, device=device), group=stage.place.group)

    def run(self, microbatches: Sequence[ModelInputs], forward_step: ForwardStep, *, backward: bool) -> None:
        """Run microbatches through the pipeline (`PolicyBackend.run`)."""
        place = self.stage.place
        per_stage = len(place.chunks) // place.size
        program = programs(place.size, per_stage, len(microbatches), backward=backward)[place.number]
        run = _Run(self, microbatches, forward_step, backward)
        self.model.train(backward)
        with torch.set_grad_enabled(backward):
            for step in program:
                run.exchange(step) if isinstance(step, StageExchange) else run.make(step)
        run.finish(keep=0)
        reshard(self.model)


def pipeline_for(
    model: ShardableModel, config: PolicyConfig, meshes: Meshes, score: Score, enter: Enter
) -> Pipeline | None:
    """Return the `Pipeline` of a model that is divided into stages, or None for a whole model."""
    stage = stage_of(model.hf)
    if stage is None:
        return None
    width, dtype = model.hf.config.get_text_config().hidden_size, torch_dtype(config.precision)
    if dtype == torch.float32:  # layers compute in the dtype of their parameters
        dtype = next(model.parameters()).dtype
    token_parts = meshes.layout.tp if config.dtensor_cfg.sequence_parallel else 1
    return Pipeline(model, stage, HiddenStates(width, dtype, token_parts), score, enter)


@dataclass
class _Run:
    """The state of one run of a program."""

    pipeline: Pipeline
    microbatches: Sequence[ModelInputs]
    forward_step: ForwardStep
    backward: bool
    arriving: dict[Pass, tuple["_Round", Tensor]] = field(default_factory=dict)
    """Input from another stage for each pass: the round in which it is received, and its buffer."""
    leaving: dict[Pass, Tensor] = field(default_factory=dict)
    """Outputs of this stage that are not sent yet, by the pass of the other stage that needs them."""
    waiting: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    """Input and output (or loss) of a chunk, by chunk and microbatch, until the backward pass."""
    started: deque["_Round"] = field(default_factory=deque)
    """Rounds whose sends and receives may not be finished."""

    def make(self, step: Pass) -> None:
        """Make a pass of this stage."""
        taken = self._take(step)
        self.pipeline.enter(self.microbatches[step.microbatch])
        if step.kind == "forward":
            self._forward(step, taken)
        else:
            self._backward(step, taken)

    def exchange(self, exchange: StageExchange) -> None:
        """Start the sends and receives of a round."""
        place = self.pipeline.stage.place
        group = place.group
        sent = [(transfer, self.leaving.pop(transfer.wanted_by)) for transfer in exchange.sends]
        received = [
            (transfer, self.pipeline.hidden.empty(self.microbatches[transfer.wanted_by.microbatch], place.device))
            for transfer in exchange.receives
        ]
        operations = [P2POp(dist.isend, tensor, group=group, group_peer=transfer.peer) for transfer, tensor in sent]
        operations += [
            P2POp(dist.irecv, tensor, group=group, group_peer=transfer.peer) for transfer, tensor in received
        ]
        started = _Round(batch_isend_irecv(operations), [tensor for _, tensor in sent], self.pipeline.limit)
        self.arriving.update({transfer.wanted_by: (started, tensor) for transfer, tensor in received})
        self.started.append(started)
        self.finish(keep=_ROUNDS_ON_THE_WAY)

    def finish(self, keep: int) -> None:
        """Wait for all rounds except the last `keep`."""
        while len(self.started) > keep:
            self.started.popleft().wait()

    def _take(self, step: Pass) -> Tensor | None:
        if step not in self.arriving:
            return None
        started, tensor = self.arriving.pop(step)
        started.wait()
        return tensor

    def _forward(self, step: Pass, hidden: Tensor | None) -> None:
        pipeline, inputs = self.pipeline, self.microbatches[step.microbatch]
        place, is_last = pipeline.stage.place, step.chunk == len(self.pipeline.stage.place.chunks) - 1
        if hidden is not None:
            given = {name: value for name, value in inputs.model_inputs.items() if name != "input_ids"}
            inputs = replace(inputs, model_inputs=given | {"inputs_embeds": hidden.requires_grad_(self.backward)})
        with active(pipeline.model.hf, place, step.chunk):
            if is_last:
                out = self.forward_step(step.microbatch, *pipeline.score(inputs))
            else:
                out = pipeline.model.body(inputs.model_inputs)
        if not is_last:
            assert out is not None
            following = Pass("forward", step.chunk + 1, step.microbatch)
            self.leaving[following] = out.detach().to(pipeline.hidden.dtype).contiguous()
        if self.backward:
            assert out is not None
            self.waiting[step.chunk, step.microbatch] = (hidden, out)

    def _backward(self, step: Pass, gradient: Tensor | None) -> None:
        hidden, out = self.waiting.pop((step.chunk, step.microbatch))
        if out.requires_grad:  # False if all weights up to this chunk are frozen
            torch.autograd.backward(out, gradient if gradient is None else gradient.to(out.dtype))
        if hidden is not None:
            arrived = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
            self.leaving[Pass("backward", step.chunk - 1, step.microbatch)] = arrived.contiguous()


@dataclass
class _Round:
    """Send and receives that started together."""

    works: list[dist.Work]
    """Handles to wait for."""
    sent: list[Tensor]
    """Tensors that must stay in memory until they are sent."""
    limit: timedelta | None
    """Time after which a wait raises an error. If None, the group's watchdog limits the time."""

    def wait(self) -> None:
        """Wait for the sends and receives. On GPUs, only the current stream waits. Later calls return immediately."""
        for work in self.works:
            work.wait(self.limit) if self.limit else work.wait()
        self.works, self.sent = [], []
