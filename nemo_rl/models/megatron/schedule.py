"""Run microbatches through stages with Megatron Core's schedules: one stage, 1F1B or interleaved 1F1B.

Losses are already divided by global token counts, so gradients are sums over microbatches and over data-parallel and
context-parallel ranks. `calculate_per_token_loss` prevents Megatron Core from averaging them, and gradients are
finalized without a token count.

Invariant: any number of microbatches of any lengths can run on any number of stages. `build.transformer_config` sets
the fields of the model's configuration that the schedules read.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, _p2p_ops
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from nemo_rl.models.megatron.inputs import RankInputs, TokenDivision, without_scores
from nemo_rl.models.megatron.routers import MegatronReplayedRouters, routers
from nemo_rl.models.megatron.scoring import RowScorer
from nemo_rl.models.training.interfaces import ForwardStep

type Watch = Callable[[RankInputs], AbstractContextManager[None]]
"""Function that returns a context manager for the forward pass of a microbatch in a chunk of this stage."""


def prepare(chunks: Sequence[Any]) -> None:
    """Set the function that finalizes the gradients of this rank's GPTModels after a pass."""
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = _finalize


def _finalize(chunks: list[Any], num_tokens: Tensor | None = None, **how: Any) -> None:
    """Sum gradients over the ranks that have parts of them, without division."""
    finalize_model_grads(chunks, None, **how)


class StageLinks(P2PCommunicator):
    """Send messages between stages, and their shapes in the same way.

    Megatron Core sends shapes in a batch even if it sends messages one by one. With two interleaved stages, a stage
    could then mistake the shape of hidden states for that of a gradient.
    """

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        device = torch.cuda.current_device()
        sent = [
            None if tensor is None else torch.tensor(tensor.size(), dtype=torch.int64, device=device)
            for tensor in (tensor_send_next, tensor_send_prev)
        ]
        received = [
            torch.zeros(3, dtype=torch.int64, device=device) if asked else None for asked in (recv_prev, recv_next)
        ]
        requests = _p2p_ops(
            tensor_send_next=sent[0],
            tensor_send_prev=sent[1],
            tensor_recv_prev=received[0],
            tensor_recv_next=received[1],
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        for request in requests.values():
            request.wait()
        previous, following = ([0, 0, 0] if shape is None else shape.tolist() for shape in received)
        return previous, following


class Schedule:
    """Run the microbatches of this rank.

    Args:
        chunks: chunks of this rank after `prepare`; for training they are wrapped for data parallelism.
        scoring: function that converts the last stage's hidden states to scores.
        division: division of a row's tokens among ranks.
        watch: context manager around every forward pass of a training microbatch.
        replay: the routers that choose recorded experts; None without replay.
    """

    def __init__(
        self,
        chunks: list[Any],
        scoring: RowScorer,
        division: TokenDivision,
        watch: Watch | None = None,
        replay: MegatronReplayedRouters | None = None,
    ) -> None:
        self._chunks, self._scoring, self._division, self._watch = chunks, scoring, division, watch
        self._replay = replay
        self._config = chunks[0].config
        self._balances = any(router.is_aux_loss_enabled() for router in routers(chunks))
        self._groups = ProcessGroupCollection.use_mpu_process_groups()
        self._links = StageLinks(self._groups.pp, self._config)
        self._num_given = 0

    def run(self, microbatches: Sequence[RankInputs], forward_step: ForwardStep, *, backward: bool) -> None:
        """Run microbatches. A training pass starts with zero gradients, and an update must follow it."""
        for chunk in self._chunks:
            chunk.train(backward)
        filled, self._num_given = self._filled(microbatches), len(microbatches)
        if backward and self._balances:
            self._weigh_auxiliary_losses(filled)
        if backward and self._scoring.mtp is not None:
            self._scoring.mtp.begin(filled)
        step = partial(self._forward, _loss_of(forward_step, len(microbatches), backward=backward), backward)
        with torch.set_grad_enabled(backward):
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[enumerate(filled) for _ in self._chunks],
                model=self._chunks,
                num_microbatches=len(filled),
                seq_length=1,  # not used: shapes are sent with the tensors
                micro_batch_size=1,
                forward_only=not backward,
                p2p_communicator=self._links,
                pg_collection=self._groups,
            )
        if self._replay is not None:
            self._end_replay(microbatches if backward else ())

    def _end_replay(self, trained: Sequence[RankInputs]) -> None:
        assert self._replay is not None, "the caller checks it"
        self._replay.stop()
        for inputs in trained:
            self._replay.count(inputs)

    def _filled(self, microbatches: Sequence[RankInputs]) -> list[RankInputs]:
        """Return the microbatches. For interleaved stages, microbatches without scores are added to complete groups.

        Interleaved stages process groups of as many microbatches as stages, and need two groups. With one group, all
        forward passes would precede the first backward pass, and neighbouring stages would wait forever for each
        other's shapes.
        """
        stages, given = self._groups.pp.size(), len(microbatches)
        missing = max(-(-given // stages), 2) * stages - given if len(self._chunks) > 1 else 0
        if not missing:
            return list(microbatches)
        shortest = min(microbatches, key=lambda inputs: inputs.real_tokens.numel())
        return [*microbatches, *[without_scores(shortest)] * missing]

    def _forward(
        self,
        loss_of: Callable[[int, tuple[Tensor, Tensor]], tuple[Tensor, Tensor, dict[str, Any]]],
        backward: bool,
        numbered: Iterator[tuple[int, RankInputs]],
        chunk: Any,
    ) -> tuple[Any, Callable[..., Any]]:
        """Run one forward pass. Megatron Core calls this as `forward_step_func`."""
        index, inputs = next(numbered)
        arguments = {**inputs.arguments, "output_processor": self._scoring, "output_processor_context": inputs}
        if self._balances:
            # # Only in the first stage, Megatron Core divides the mask among ranks together with the tokens.
            first = get_attr_wrapped_model(chunk, "pre_process")
            arguments["padding_mask"] = ~(inputs.real_tokens if first else inputs.between_layers(self._division))
        watches = backward and self._watch is not None and index < self._num_given
        if self._replay is not None:
            self._replay.use(inputs)
        with self._watch(inputs) if watches and self._watch is not None else nullcontext():
            return chunk(**arguments), partial(loss_of, index)

    def _weigh_auxiliary_losses(self, microbatches: Sequence[RankInputs]) -> None:
        """Scale Megatron Core's auxiliary losses to means over the tokens of all microbatches and ranks.

        Megatron Core multiplies each loss by the number of tokens and the number of ranks that share the microbatch,
        and expects a later division by all tokens. Its number of tokens is already a sum over these ranks
        (`moe_utils.get_tokens_per_expert_and_token_count`), so it counts the ranks twice. This function sets a factor
        that divides by all tokens and by the number of these ranks.
        """
        tokens = sum(inputs.real_tokens.sum() for inputs in microbatches)
        assert isinstance(tokens, Tensor), "there is a microbatch"
        dist.all_reduce(tokens, group=self._groups.dp_cp)
        counted = tokens.clamp(min=1).float() * self._groups.tp_cp.size()
        self._config.moe_grad_scale_func = lambda: 1.0 / counted


def _loss_of(
    forward_step: ForwardStep, num_microbatches: int, *, backward: bool
) -> Callable[[int, tuple[Tensor, Tensor]], tuple[Tensor, Tensor, dict[str, Any]]]:
    """Return Megatron Core's loss function: `(loss, number of tokens, results)`, of which only the loss is used."""

    def loss_of(index: int, scores: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        loss = forward_step(index, *scores) if index < num_microbatches else None
        if loss is None:
            # The schedule needs a loss even without scores. In a training pass it must depend on every parameter.
            loss = 0.0 * scores[0].sum() if backward else torch.zeros((), device=scores[0].device)
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}

    return loss_of
