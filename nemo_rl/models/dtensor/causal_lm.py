"""A Hugging Face causal language model whose forward returns token log-probabilities.

The decoder body computes hidden states; the output head then runs only on the positions that are scored, in
chunks (`distributed.parallel_logprobs`). Both happen inside one module's forward, because FSDP2
gathers the root's parameters (embedding, final norm, head) around that call.

Invariant: parameters keep their Hugging Face names under `hf`, and the log-probabilities are those of the model's own
logits: `find_transform` compares the two. A model with a head that `huggingface.head` cannot describe uses its own
forward, on ranks that hold the whole head.
"""

import logging
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.distributed.parallel_logprobs import (
    LogitTransform,
    SamplingDensity,
    TopK,
    logprobs_from_logits,
    token_logprobs,
    topk_logits,
    topk_of,
)
from nemo_rl.distributed.parallel_logprobs.head import OutputHead
from nemo_rl.distributed.ranks.collectives import reduce_gradient
from nemo_rl.models.draft.trainer import DraftTrainer
from nemo_rl.models.dtensor.parallelize import ShardableModel
from nemo_rl.models.huggingface.head import find_transform
from nemo_rl.models.huggingface.layers import hidden_states
from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)


class CausalLMWithLogprobs(ShardableModel):
    """Wraps a Hugging Face model; see the module docstring."""

    draft: DraftTrainer | None = None
    """The draft model's trainer, which learns from training passes; None: there is none."""

    def __init__(self, hf: PreTrainedModel, *, transform: LogitTransform | None, chunk_size: int | None = None) -> None:
        super().__init__()
        self.hf = hf
        """The wrapped model; its `named_parameters` are the names to export."""
        self.transform = transform
        """Operations after the linear head; None: the model's own forward gives the logits."""
        self.chunk_size = chunk_size
        """Tokens per chunk of logits; None takes a default for the device."""

    def forward(
        self,
        model_inputs: dict[str, Any],
        positions_K: Tensor,
        targets_K: Tensor,
        density: SamplingDensity | None = None,
        top_k: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Score target tokens, or find the most likely tokens.

        Args:
            model_inputs: the model's keyword arguments; `input_ids` is `[b, T]`, or `[1, N]` packed.
            positions_K: `[K]` indices into the flattened `[b * T]` tokens; the successor of each is scored.
            targets_K: `[K]` token ids of the successors, or `[K, k]`.
            density: the sampler's temperature and filters; None means the plain softmax.
            top_k: ignore the targets and return the largest logits at each position.

        Returns:
            `(logprobs, entropy_K)`, float32, `logprobs` shaped like the targets; with `top_k`
            `(logits_Kk, ids_Kk)`, float32 and int64, largest first.
        """
        if self.transform is None:
            return self._score_with_own_forward(model_inputs, positions_K, targets_K, density, top_k)
        return self._score(hidden_states(self.hf, model_inputs), positions_K, targets_K, density, top_k)

    def _score(
        self,
        hidden: Tensor,
        positions_K: Tensor,
        targets_K: Tensor,
        density: SamplingDensity | None,
        top_k: TopK | None,
    ) -> tuple[Tensor, Tensor]:
        """Score the body's hidden states `[b, T, D]`, or `[b, T / tp, D]` with sequence parallelism.

        Each rank's head gives one part of the gradient of the hidden states; the backward pass sums the parts.
        """
        assert self.transform is not None
        hidden_KD = self.whole_rows(hidden, partial_gradient=True).flatten(0, 1).index_select(0, positions_K)
        if not self.sequence_parallel:
            hidden_KD = reduce_gradient(hidden_KD, self.tp_group)
        head = self.hf.get_output_embeddings()
        weight_VD = _rows_here(head.weight, self.tp_group)
        bias_V = None if head.bias is None else _rows_here(head.bias, self.tp_group)
        if self.draft is not None:
            self.draft.learn(hidden_KD, OutputHead(weight_VD, bias_V, self.transform, self.tp_group))
        how: dict[str, Any] = {"transform": self.transform, "group": self.tp_group, "chunk_size": self.chunk_size}
        if top_k is not None:
            return topk_logits(hidden_KD, weight_VD, top_k, bias_V=bias_V, **how)
        return token_logprobs(hidden_KD, weight_VD, targets_K, density=density, bias_V=bias_V, **how)

    def _score_with_own_forward(
        self,
        model_inputs: dict[str, Any],
        positions_K: Tensor,
        targets_K: Tensor,
        density: SamplingDensity | None,
        top_k: TopK | None,
    ) -> tuple[Tensor, Tensor]:
        logits = self.hf(**model_inputs, use_cache=False).logits
        logits_KV = logits.flatten(0, 1).index_select(0, positions_K)
        if top_k is not None:
            return topk_of(logits_KV, top_k)
        return logprobs_from_logits(logits_KV, targets_K, density=density)


def build_causal_lm(
    hf: PreTrainedModel,
    *,
    transform: LogitTransform | None | Literal["find"] = "find",
    chunk_size: int | None = None,
    divides_head: bool = False,
) -> CausalLMWithLogprobs:
    """Wrap an unsharded model.

    Args:
        hf: the model.
        transform: result of `find_transform` for the architecture; "find" calls it with `hf`, which then needs weights.
        chunk_size: tokens per chunk of logits; None takes a default for the device.
        divides_head: whether tensor-parallel ranks will divide the head's rows.

    Raises:
        ConfigError: the head is to be divided, and `find_transform` cannot describe how it computes logits.
    """
    if transform == "find":
        transform = find_transform(hf)
    if transform is None and divides_head:
        raise ConfigError(
            f"{type(hf).__name__} makes its logits by more than a linear head, a logit scale and soft-capping, so "
            "tensor-parallel ranks cannot divide its vocabulary. Set policy.dtensor_cfg.tensor_parallel_size=1; "
            "data-parallel ranks divide its memory without dividing its logits."
        )
    if transform is None:
        logger.warning(
            "%s makes its logits by more than a linear head, a logit scale and soft-capping; its own forward is "
            "used, which holds the logits of a whole microbatch in memory.",
            type(hf).__name__,
        )
    return CausalLMWithLogprobs(hf, transform=transform, chunk_size=chunk_size)


def _rows_here(parameter: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's rows of a parameter of the head; all rows if there is no group."""
    if group is None:
        return parameter
    assert isinstance(parameter, DTensor), "tensor-parallel ranks divide the head"
    rows = parameter.to_local()
    assert rows.shape[0] * group.size() == parameter.shape[0], "the ranks have equal parts of the vocabulary"
    return rows
