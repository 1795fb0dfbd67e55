"""Run a pipeline program on one stage: make its passes and exchange hidden states with other stages.

All stages have the same microbatches, so each stage can compute the shape of every tensor it receives. Sends and
receives of one round are started together and finished later: before their tensors are used, and at the latest after
two more rounds of this stage have been started, which bounds the number of tensors in transit.

Invariant: a stage computes gradients of sums, as one process does; this module scales no loss.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import P2POp, batch_isend_irecv

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.ranks.process_group import collective_timeout
from nemo_rl.models.dtensor.mesh import Meshes
from nemo_rl.models.dtensor.parallelize import ShardableModel, reshard
from nemo_rl.models.dtensor.pipeline.schedule import Exchange, Pass, programs
from nemo_rl.models.dtensor.pipeline.stages import Stage, active, stage_of
from nemo_rl.models.huggingface.load import torch_dtype
from nemo_rl.models.training.inputs import ModelInputs
from nemo_rl.models.training.interfaces import ForwardStep

type Score = Callable[[ModelInputs], tuple[Tensor, Tensor]]
"""Computes the model's scores of one microbatch; in the last stage its model inputs hold `inputs_embeds`."""
type Enter = Callable[[ModelInputs], None]
"""Prepares a pass of one microbatch; layers may be computed again in its backward pass."""

_ROUNDS_ON_THE_WAY = 2


@dataclass(frozen=True)
class HiddenStates:
    """Shape and dtype of the tensors that stages exchange: local tensors `[b, T / token_parts, width]`."""

    width: int
    """The model's hidden size."""
    dtype: torch.dtype
    """Dtype of the layers' outputs."""
    token_parts: int = 1
    """Number of ranks that divide the tokens between layers (sequence parallelism)."""

    def shape(self, inputs: ModelInputs) -> tuple[int, int, int]:
        """Return the shape for a microbatch on this rank, which has only its own tokens in context parallelism."""
        rows, tokens = inputs.model_inputs["input_ids"].shape
        return rows, tokens // self.token_parts, self.width

    def empty(self, inputs: ModelInputs, device: torch.device) -> Tensor:
        """Return a new tensor to receive into."""
        return torch.empty(self.shape(inputs), dtype=self.dtype, device=device)


class Pipeline:
    """Runs microbatches through the stages.

    Args:
        model: the wrapped model after `cut`, sharded.
        stage: the part of the model that this rank holds.
        hidden: shape and dtype of the tensors that stages exchange.
        score: called in the last stage for the last chunk.
        enter: called before each forward and backward pass of this stage.
    """

    def __init__(self, model: ShardableModel, stage: Stage, hidden: HiddenStates, score: Score, enter: Enter) -> None:
        self.model, self.stage, self.hidden, self.score, self.enter = model, stage, hidden, score, enter
        device = stage.place.device
        # On GPUs a wait with a limit would block the host; there the group's watchdog enforces the limit.
        self.limit = collective_timeout(device) if device.type == "cpu" else None
        # All ranks of an NCCL group must take part in its first communication.
        dist.all_reduce(torch.zeros(1, device=device), group=stage.place.group)

    def run(self, microbatches: Sequence[ModelInputs], forward_step: ForwardStep, *, backward: bool) -> None:
        """See `PolicyBackend.run`."""
        place = self.stage.place
        per_stage = len(place.chunks) // place.size
        program = programs(place.size, per_stage, len(microbatches), backward=backward)[place.number]
        run = _Run(self, microbatches, forward_step, backward)
        self.model.train(backward)
        with torch.set_grad_enabled(backward):
            for step in program:
                run.exchange(step) if isinstance(step, Exchange) else run.make(step)
        run.finish(keep=0)
        reshard(self.model)


def pipeline_for(
    model: ShardableModel, config: PolicyConfig, meshes: Meshes, score: Score, enter: Enter
) -> Pipeline | None:
    """Return the `Pipeline` of a model that was divided into stages; None for a whole model."""
    stage = stage_of(model.hf)
    if stage is None:
        return None
    width, dtype = model.hf.config.get_text_config().hidden_size, torch_dtype(config.precision)
    if dtype == torch.float32:  # then layers compute in the dtype of their parameters
        dtype = next(model.parameters()).dtype
    token_parts = meshes.layout.tp if config.dtensor_cfg.sequence_parallel else 1
    return Pipeline(model, stage, HiddenStates(width, dtype, token_parts), score, enter)


@dataclass
class _Run:
    """One run of a program."""

    pipeline: Pipeline
    microbatches: Sequence[ModelInputs]
    forward_step: ForwardStep
    backward: bool
    arriving: dict[Pass, tuple["_Round", Tensor]] = field(default_factory=dict)
    """Round and buffer of the input of each pass."""
    leaving: dict[Pass, Tensor] = field(default_factory=dict)
    """Output of this stage for each pass of another stage."""
    waiting: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    """`(hidden states in, hidden states or loss out)` of chunk and microbatch, until the backward pass."""
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

    def exchange(self, exchange: Exchange) -> None:
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
        if out.requires_grad:  # False if all weights up to here are frozen
            torch.autograd.backward(out, gradient if gradient is None else gradient.to(out.dtype))
        if hidden is not None:
            arrived = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
            self.leaving[Pass("backward", step.chunk - 1, step.microbatch)] = arrived.contiguous()


@dataclass
class _Round:
    """Sends and receives that were started together."""

    works: list[dist.Work]
    """Handles to wait for."""
    sent: list[Tensor]
    """Tensors that must stay in memory until then."""
    limit: timedelta | None
    """Time after which a wait raises; None leaves that to the group's watchdog."""

    def wait(self) -> None:
        """Wait for the sends and receives; on GPUs only the current stream waits. Later calls return immediately."""
        for work in self.works:
            work.wait(self.limit) if self.limit else work.wait()
        self.works, self.sent = [], []
