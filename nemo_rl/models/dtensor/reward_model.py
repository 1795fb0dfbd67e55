"""A Hugging Face sequence classifier with one label, whose forward returns a number for each given position.

It has the same signature as the wrapper in `causal_lm`, so that `backend` can run either. The body computes hidden
states; the scalar head sees only the positions that the inputs name: the last token of each sequence for scores of a
reward model, the token before each target for values of a critic.

Invariant: parameters keep their Hugging Face names under `hf`, and the score of a sequence equals that of
`AutoModelForSequenceClassification`; `require_scoring_head` compares the two on a small probe model.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.distributed.parallel_logprobs import SamplingDensity, TopK, scalar_outputs
from nemo_rl.distributed.ranks.placements import held_here
from nemo_rl.models.dtensor.parallelize import ShardableModel
from nemo_rl.models.huggingface.layers import hidden_states
from nemo_rl.utils.errors import ConfigError


class RewardModel(ShardableModel):
    """Wraps a sequence classifier; see the module docstring."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        """The wrapped model; its `named_parameters` are the names to export."""

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
            targets_K: not used; part of the common signature with language models.
            density: not used.
            top_k: not used.

        Returns:
            `(scores_K, zeros_K)`, float32 (float64 for float64 models).
        """
        hidden = hidden_states(self.hf, model_inputs)
        rows = self.whole_rows(hidden, partial_gradient=False)  # every rank has the whole head and the whole gradient
        hidden_KD = rows.flatten(0, 1).index_select(0, positions_K)
        head: Any = self.hf.score
        # Tensor-parallel ranks hold the head as a DTensor that is whole on each of them.
        scores_K = scalar_outputs(
            hidden_KD, held_here(head.weight), None if head.bias is None else held_here(head.bias)
        )
        return scores_K, torch.zeros_like(scores_K)


def require_scoring_head(probe_model: PreTrainedModel) -> None:
    """Check on a small model with weights that its architecture scores a sequence as `RewardModel` does.

    Raises:
        ConfigError: the architecture scores a sequence in another way.
    """
    if not _scores_the_last_token(probe_model):
        raise ConfigError(
            f"{type(probe_model).__name__} does not score a sequence by a linear head `score` on its last token, "
            "so it cannot be trained as a reward model here."
        )


@torch.no_grad()
def _scores_the_last_token(hf: PreTrainedModel) -> bool:
    """Return whether the head on the last hidden state gives the model's own output, on a few tokens."""
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
    return own.shape == ours.shape == (1, 1) and bool((own - ours).abs() <= 1e-5 * own.abs().clamp(min=1.0))
