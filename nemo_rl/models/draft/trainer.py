"""Build a draft model and train it during the forward and backward passes of the policy.

    policy's training pass ─► taps: hidden states of some layers ─┐
                             output head: hidden states, weight   ─┴─► loss ─► gradients of the draft model only

Hidden states are detached before the draft model reads them. The draft model has its own optimizer, and its gradient is
clipped separately. The policy's weights are therefore bit for bit the same with and without a draft model.

The loss is the cross-entropy with the policy's distribution over the tokens that the draft model can propose:

    loss_k = -sum_v p_k(v) log q_k(v)        p: softmax of the policy's logits over these tokens; q: the draft model's

Positions at which the policy's most likely token cannot be proposed are left out. Invariant: the gradient is the mean
over all other positions of the whole update, so it does not depend on microbatches or ranks. Logits are computed and
differentiated chunk by chunk. Source: EAGLE-3 (Li et al. 2025, arXiv:2503.01840).
"""

import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_logprobs.head import OutputHead, default_chunk_size, widen
from nemo_rl.distributed.ranks.collectives import all_gather
from nemo_rl.distributed.ranks.placements import held_here
from nemo_rl.distributed.ranks.tensor_block import block_here
from nemo_rl.models.attention import AttentionPlan, PackedRow, plan_of_row
from nemo_rl.models.draft.choice import draft_folder, shape_of
from nemo_rl.models.draft.head import DraftHead, read_weights
from nemo_rl.models.draft.shape import PREFIX, published
from nemo_rl.weight_sync.parts import Held, Readable, dtype_name


class DraftSums(NamedTuple):
    """Sums over the positions of a microbatch, as scalar tensors."""

    loss: Tensor
    """Sum of the cross-entropy, float32 or wider, with a gradient."""
    agreeing: Tensor
    """Number of positions where policy and draft model have the same most likely token, float64."""
    counted: Tensor
    """Number of positions in the loss, float64."""


def draft_loss(
    draft_KD: Tensor,
    weight_UD: Tensor,
    hidden_KD: Tensor,
    head: OutputHead,
    vocab_size: int,
    ids_U: Tensor | None,
    chunk_size: int | None = None,
) -> DraftSums:
    """Compute the loss of a draft model at K positions, with gradients for the first two arguments.

    Args:
        draft_KD: hidden states of the draft model.
        weight_UD: weight of the draft model's output head, for the U tokens that it can propose.
        hidden_KD: hidden states of the policy that predict the same tokens.
        head: the policy's output head, which may have more rows than there are tokens.
        vocab_size: number of tokens of the policy.
        ids_U: the policy's id of each of the U tokens; None if the draft model can propose all tokens.
        chunk_size: number of positions whose logits are in memory at a time; if None, `default_chunk_size`.
    """
    size = chunk_size or default_chunk_size(on_gpu=draft_KD.is_cuda)
    # # The sum starts with empty sums, so that a rank without scored positions also has a backward pass.
    sums = [widen(draft_KD[:0].sum() + weight_UD[:0].sum())]
    counts = [torch.zeros(2, dtype=torch.float64, device=draft_KD.device)]
    for start in range(0, len(draft_KD), size):
        part = slice(start, start + size)
        loss, count = checkpoint(
            _of_chunk, draft_KD[part], weight_UD, hidden_KD[part], head, vocab_size, ids_U, use_reentrant=False
        )
        sums.append(loss)
        counts.append(count)
    agreeing, counted = torch.stack(counts).sum(0)
    return DraftSums(torch.stack(sums).sum(), agreeing, counted)


def _of_chunk(
    draft_nD: Tensor,
    weight_UD: Tensor,
    hidden_nD: Tensor,
    head: OutputHead,
    vocab_size: int,
    ids_U: Tensor | None,
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        target_nV = head.logits(hidden_nD)
        if head.group is not None:
            target_nV = all_gather(target_nV, 1, head.group, partial_gradient=False)
        target_nV = target_nV[:, :vocab_size]
        target_nU = target_nV if ids_U is None else target_nV.index_select(1, ids_U)
        counts_n = target_nU.max(-1).values == target_nV.max(-1).values
    log_q_nU = OutputHead(weight_UD).logits(draft_nD).log_softmax(-1)
    loss_n = -(target_nU.softmax(-1) * log_q_nU).sum(-1)
    agreeing_n = (log_q_nU.argmax(-1) == target_nU.argmax(-1)) & counts_n
    return (loss_n * counts_n).sum(), torch.stack([agreeing_n.sum(), counts_n.sum()]).double()


class Taps:
    """Hooks on the policy's embedding and decoder layers that store the hidden states of a forward pass.

    Invariant: hidden states are stored only within `watching`, so a recomputation in the backward pass stores none.

    Args:
        embedding: module whose output is the embedding of the tokens.
        layers: all decoder layers of the policy, in order.
        tapped_layers: the hidden states to keep, by the number of layers before them; 0 is the embedding.
        rows_of: returns the hidden states `[B, T, D]` of whole rows from the output of one of these modules.
    """

    def __init__(
        self,
        embedding: nn.Module,
        layers: Sequence[nn.Module],
        tapped_layers: Sequence[int],
        rows_of: Callable[[Any], Tensor],
    ) -> None:
        self._rows_of = rows_of
        self._tapped = tuple(tapped_layers)
        self._kept: dict[int, Tensor] = {}
        self._watching = False
        for number in {0, *tapped_layers}:
            module = embedding if number == 0 else layers[number - 1]
            module.register_forward_hook(self._hook(number))

    def _hook(self, number: int) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._watching:
                with torch.no_grad():
                    self._kept[number] = self._rows_of(output).detach()

        return keep

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run a block in which the hidden states of a forward pass are stored. They are removed at its end."""
        self._watching, self._kept = True, {}
        try:
            yield
        finally:
            self._watching, self._kept = False, {}

    def embedding(self) -> Tensor:
        """Return the stored embedding of the tokens."""
        return self._kept[0]

    def tapped(self) -> list[Tensor]:
        """Return the stored hidden states, in the order of `tapped_layers`."""
        return [self._kept[number] for number in self._tapped]


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftRows:
    """The tokens of a microbatch, with the K positions that the policy scores."""

    position_ids_BT: Tensor
    """Position of each token in its sequence."""
    positions_K: Tensor
    """Indices into the flattened `[B * T]` tokens after which the draft model learns the policy's distribution."""
    bounds: Tensor | None = None
    """`[S + 1]` int32, start of each sequence of a packed row, and the end of the last. None if each row is one
    sequence."""
    longest: int | None = None
    """Length of the longest sequence of a packed row."""

    @property
    def plan(self) -> AttentionPlan:
        """The attention plan of the sequences of a row."""
        if self.bounds is None:
            return plan_of_row(self.position_ids_BT.shape[1])
        return PackedRow(self.bounds, self.longest)


class DraftModel(nn.Module):
    """The draft model with a forward that computes the loss, so that FSDP2 gathers weights for the loss too.

    Args:
        chunk_size: number of positions whose logits are in memory at a time; if None, the device's default.
    """

    def __init__(self, head: DraftHead, chunk_size: int | None = None) -> None:
        super().__init__()
        self.head = head
        self.chunk_size = chunk_size

    def forward(
        self,
        tapped_BTD: Tensor,
        embeds_BTD: Tensor,
        rows: tuple[Tensor, AttentionPlan, Tensor],
        hidden_KD: Tensor,
        target: OutputHead,
    ) -> DraftSums:
        """Compute the loss.

        Args:
            tapped_BTD: see `DraftHead.forward`.
            embeds_BTD: see `DraftHead.forward`.
            rows: `position_ids_BT`, `plan` and `places_K` of `DraftHead.forward`.
            hidden_KD: see `draft_loss`.
            target: the policy's output head.
        """
        draft_KD = self.head(tapped_BTD, embeds_BTD, *rows)
        head, vocab_size = self.head.lm_head, self.head.shape.vocab_size
        ids = self.head.target_ids()
        return draft_loss(draft_KD, head.weight, hidden_KD, target, vocab_size, ids, self.chunk_size)


class DraftTrainer:
    """Train a draft model during the policy's passes.

    Args:
        model: the draft model, sharded or not.
        taps: hooks on the policy.
        optimizer: optimizer of the draft model's parameters; it gets the policy's learning rate.
        max_grad_norm: norm to which the draft model's gradient is clipped; if None, it is not clipped.
        groups: groups of ranks with different tokens. Sums are reduced over one group after another.
    """

    def __init__(
        self,
        model: DraftModel,
        taps: Taps,
        optimizer: Optimizer,
        *,
        max_grad_norm: float | None,
        loss_weight: float,
        groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._taps, self._groups = taps, groups
        self._max_grad_norm, self._loss_weight = max_grad_norm, loss_weight
        self._rows: DraftRows | None = None
        device = next(model.parameters()).device
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)
        self._finite = True

    @property
    def head(self) -> DraftHead:
        """The draft model without its loss."""
        return self.model.head

    @contextmanager
    def watching(self, rows: DraftRows) -> Iterator[None]:
        """Run a block in which the draft model is trained on the policy's forward pass of a microbatch."""
        self._rows = rows
        try:
            with self._taps.watching():
                yield
        finally:
            self._rows = None

    def learn(self, hidden_KD: Tensor, target: OutputHead) -> None:
        """Add the draft model's gradients for the microbatch of `watching`. Outside of `watching`, do nothing.

        Args:
            hidden_KD: the policy's hidden states at the scored positions.
            target: the policy's output head.
        """
        if self._rows is None:
            return
        positions = self._rows.position_ids_BT
        # # The draft model predicts from the previous position, which a sequence's first position does not have.
        follows_K = positions.flatten().index_select(0, self._rows.positions_K) > 0
        places_K = self._rows.positions_K[follows_K] - 1
        tapped = torch.cat(self._taps.tapped(), -1)
        embeds = self._taps.embedding().roll(-1, 1)  # the last position of a sequence is wrong, but not used
        bias = None if target.bias_V is None else target.bias_V.detach()
        frozen = OutputHead(target.weight_VD.detach(), bias, target.transform, target.group)
        with torch.enable_grad():
            rows = (positions, self._rows.plan, places_K)
            sums = self.model(tapped, embeds, rows, hidden_KD.detach()[follows_K], frozen)
            sums.loss.backward()
        self._sums += torch.stack([sums.loss.detach().double(), sums.agreeing, sums.counted])

    def end_passes(self) -> dict[str, float]:
        """Finish the gradient of an update, and return metrics that are equal on all ranks. The call is collective."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        for group in self._groups:
            dist.all_reduce(sums, group=group)
        loss, agreeing, counted = sums.tolist()
        counted = max(counted, 1.0)
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(self._loss_weight / counted)
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self._finite = math.isfinite(norm)
        if self._max_grad_norm and self._finite:
            clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
        return {
            "draft_loss": loss / counted,
            "draft_agreement": agreeing / counted,
            "draft_grad_norm": norm.item(),
        }

    def step(self, learning_rate: float) -> None:
        """Update the draft model, unless its gradient is not finite.

        Args:
            learning_rate: the current learning rate of the policy.
        """
        if self._finite:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        else:
            logger.warning("The gradient of the draft model is not finite; it is not updated in this step.")
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Discard the gradients and sums of an update."""
        self.model.zero_grad(set_to_none=True)
        self._sums.zero_()

    def held_weights(self, dtype: torch.dtype | None, device: torch.device) -> Iterator[Readable]:
        """Yield the draft model's tensors for the weight stream, after the policy's tensors.

        Args:
            dtype: type to which floating-point tensors are cast; if None, float32 is kept.
        """
        for number, (name, tensor) in enumerate(self.head.state_dict(keep_vars=True).items()):
            place, order = block_here(tensor), (sys.maxsize, number)
            cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            blocks = (place,) if place.numel else ()
            full_name = PREFIX + published(name, self.head.shape.num_layers)
            held = Held(full_name, dtype_name(cast), tuple(tensor.shape), order, blocks)
            yield Readable(held, partial(_read, tensor.detach(), cast, device))


def _read(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    held = held_here(tensor)
    return [held.to(device, dtype)] if held.numel() else []


def build_draft_model(
    config: PolicyConfig, mesh: DeviceMesh, dtype: torch.dtype, device: torch.device, seed: int
) -> DraftModel:
    """Build the draft model of a policy section. The call is collective.

    FSDP2 shards it separately from the policy, because its backward pass runs inside the policy's forward pass.

    Args:
        mesh: the ranks with different tokens, which shard the weights.
        dtype: dtype of the forward and backward pass; the weights are float32.
        seed: run seed, for the weights of a new draft model.
    """
    head = DraftHead(shape_of(config))
    head.draw(torch.Generator().manual_seed(seed))
    if config.draft.model_name is not None:
        read_weights(head, draft_folder(config.draft.model_name))
    model = DraftModel(head.to(device), config.logprob_chunk_size)
    if mesh.size() > 1 or dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        fully_shard(model, mesh=mesh, mp_policy=precision)
        assert isinstance(model, FSDPModule)
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
    return model
