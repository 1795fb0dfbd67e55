"""Wrap Hugging Face models so that their forward returns log-probabilities of tokens, or one number per position.

Both wrappers have the same signature, so that `backend` can run either of them. The decoder body computes hidden
states, and the head runs only on the given positions. Both run inside the forward of one module, because FSDP2 gathers
the root's parameters (embedding, final norm, head) around that call.

`CausalLMWithLogprobs` computes log-probabilities in chunks (`distributed.parallel_logprobs`). It needs to know which
operations follow the linear head (`huggingface.logits.find_transform`). If no known operation reproduces the logits,
the model's own forward computes them, on ranks that hold the whole head.

`RewardModel` wraps a sequence classifier, with a label for each of its scores. The positions are the last token of each
sequence for scores of a reward model, and the token before each target for values of a critic.

Invariant: parameters keep their Hugging Face names under `hf`. Log-probabilities are those of the model's own logits.
The score of a sequence equals that of `AutoModelForSequenceClassification`; `require_scoring_head` compares the two on
a small probe model.
"""

import logging
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.distributed.parallel_logprobs import (
    LogitTransform,
    SamplingDensity,
    TopK,
    logprobs_from_logits,
    scalar_outputs,
    token_logprobs,
    topk_logits,
    topk_of,
)
from nemo_rl.distributed.parallel_logprobs.head import OutputHead
from nemo_rl.distributed.ranks.collectives import reduce_gradient
from nemo_rl.distributed.ranks.placements import held_here
from nemo_rl.models.adapters.slots import head_update
from nemo_rl.models.draft.trainer import DraftTrainer
from nemo_rl.models.dtensor.parallelize import ShardableModel
from nemo_rl.models.huggingface.layers import hidden_states
from nemo_rl.models.huggingface.logits import find_transform
from nemo_rl.utils.errors import ConfigError


class RewardModel(ShardableModel):
    """A sequence classifier that returns one number, or one for each of its labels, for each given position."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        """The wrapped model. Its `named_parameters` define the exported names."""

    def forward(
        self,
        model_inputs: dict[str, Any],
        positions_K: Tensor,
        targets_K: Tensor,
        density: SamplingDensity | None = None,
        top_k: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Score the sequences up to the given positions.

        Args:
            model_inputs: the model's keyword arguments; `input_ids` is `[b, T]`, or `[1, N]` packed.
            positions_K: `[K]` indices into the flattened `[b * T]` tokens.
            targets_K: not used, as are the next two; the signature is that of `CausalLMWithLogprobs`.
            density: not used.
            top_k: not used.

        Returns:
            `(scores_K, zeros_K)`, or `(scores_KN, zeros_KN)` for N labels, float32 (float64 for float64 models).
        """
        hidden = hidden_states(self.hf, model_inputs)
        rows = self.whole_rows(hidden, partial_gradient=False)  # every rank has the whole head and the whole gradient
        hidden_KD = rows.flatten(0, 1).index_select(0, positions_K)
        head: Any = self.hf.score
        # # Tensor-parallel ranks hold the head as a DTensor that is whole on each rank.
        scores = scalar_outputs(hidden_KD, held_here(head.weight), None if head.bias is None else held_here(head.bias))
        return scores, torch.zeros_like(scores)


def require_scoring_head(probe_model: PreTrainedModel) -> None:
    """Check that the architecture of a small model with weights scores a sequence in the same way as `RewardModel`.

    Raises:
        ConfigError: the architecture scores a sequence in another way.
    """
    if not _scores_the_last_token(probe_model):
        raise ConfigError(
            f"{type(probe_model).__name__} does not score a sequence by a linear head `score` on its last token, so "
            "it cannot be trained as a reward model here."
        )


@torch.no_grad()
def _scores_the_last_token(hf: PreTrainedModel) -> bool:
    """Return whether the head, applied to the hidden state of the last of a few tokens, gives the model's output."""
    head = getattr(hf, "score", None)
    if not isinstance(head, nn.Linear) or hf.base_model is hf:
        return False
    embeddings: Any = hf.get_input_embeddings()
    vocab_size = embeddings.weight.shape[0]
    tokens = (torch.arange(8, device=head.weight.device) * 5 + 1) % vocab_size
    pad = hf.config.get_text_config().pad_token_id
    if pad is not None:
        tokens = torch.where(tokens == pad, (tokens + 1) % vocab_size, tokens)
    tokens = tokens[None]
    own = hf(input_ids=tokens, use_cache=False).logits
    ours = head(hidden_states(hf, {"input_ids": tokens})[:, -1])
    alike = own.shape == ours.shape == (1, head.out_features)
    return alike and bool(((own - ours).abs() <= 1e-5 * own.abs().clamp(min=1.0)).all())


logger = logging.getLogger(__name__)


class CausalLMWithLogprobs(ShardableModel):
    """A causal language model that returns the log-probabilities of target tokens."""

    draft: DraftTrainer | None = None
    """Trainer of the draft model, which learns from training passes; None if there is no draft model."""

    def __init__(self, hf: PreTrainedModel, *, transform: LogitTransform | None, chunk_size: int | None = None) -> None:
        super().__init__()
        self.hf = hf
        """The wrapped model. Its `named_parameters` define the exported names."""
        self.transform = transform
        """Operations after the linear head. If None, the model's own forward computes the logits."""
        self.chunk_size = chunk_size
        """Tokens per chunk of logits. If None, the device's default."""

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
        """Score the hidden states `[b, T, D]`, or `[b, T / tp, D]` with sequence parallelism.

        Each rank's part of the head yields a part of the hidden states' gradient. The backward pass sums these parts.
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
        how["update"] = head_update(head, hidden_KD)
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
        transform: result of `find_transform` for the architecture; "find" calls it with `hf`, which then needs weights.
        chunk_size: tokens per chunk of logits; if None, the device's default.
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
    """Return this rank's rows of a parameter of the head. Without a group, return all rows."""
    if group is None:
        return parameter
    assert isinstance(parameter, DTensor), "tensor-parallel ranks divide the head"
    rows = parameter.to_local()
    assert rows.shape[0] * group.size() == parameter.shape[0], "the ranks have equal parts of the vocabulary"
    return rows
