"""A Hugging Face sequence classifier with one label, whose forward returns a score for each asked position.

The counterpart of `causal_lm` for reward models: the same call, so that `backend` runs either. The body runs
to hidden states, the scalar head sees only the last token of each sequence, packed or padded.

Invariant: parameters keep their Hugging Face names under `hf`, and the score of a sequence is what
`AutoModelForSequenceClassification` gives for it; `build_reward_model` compares the two on a small twin.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_logprobs import SamplingDensity, TopK
from nemo_rl.models.dtensor.attention import attention_to_load, choose_attention
from nemo_rl.models.dtensor.parallelize import ShardableModel
from nemo_rl.models.dtensor.pipeline.stages import try_division
from nemo_rl.models.dtensor.verdict import found_by_one_rank
from nemo_rl.models.huggingface.load import load_scoring_model
from nemo_rl.models.huggingface.rotary import fix_rotary_frequencies
from nemo_rl.models.huggingface.twin import small_twin
from nemo_rl.models.huggingface.unread import Unread, weights_left_in_files
from nemo_rl.utils.errors import ConfigError


class RewardModel(ShardableModel):
    """Wraps a sequence classifier; see the module docstring.

    Attributes:
        hf: the wrapped model; its `named_parameters` are the names to export.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf

    def forward(
        self,
        model_inputs: dict[str, Any],
        positions_K: Tensor,
        targets_K: Tensor,
        density: SamplingDensity | None = None,
        top_k: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Score the sequences that end at the given positions.

        Args:
            model_inputs: the model's keyword arguments; `input_ids` is `[b, T]`, or `[1, N]` packed.
            positions_K: `[K]` indices into the flattened `[b * T]` tokens: the last token of each sequence.
            targets_K: not used; part of the call that language models share.
            density: not used.
            top_k: not used.

        Returns:
            `(scores_K, zeros_K)`, float32.
        """
        hidden = self.hf.base_model(**model_inputs, use_cache=False).last_hidden_state
        rows = self.whole_rows(hidden, partial_gradient=False)  # every rank has the head, and the whole gradient
        hidden_KD = rows.flatten(0, 1).index_select(0, positions_K)
        head: Any = self.hf.score
        scores_K = head(hidden_KD).squeeze(-1).float()
        return scores_K, torch.zeros_like(scores_K)


def build_reward_model(config: PolicyConfig) -> tuple[RewardModel, Unread]:
    """Make the model named by the policy section with a scalar head, its weights left in files; collective.

    Raises:
        ConfigError: the architecture has no such head, or mixes packed sequences.
    """
    with weights_left_in_files() as unread:
        hf = load_scoring_model(
            config.model_name,
            config_overrides=config.hf_config_overrides,
            attn_implementation=attention_to_load(config),
        )
    context = config.max_total_sequence_length
    fix_rotary_frequencies(hf, context)
    hf.set_attn_implementation(found_by_one_rank(partial(_try_out, hf, context, config)))
    return RewardModel(hf), unread


def _try_out(hf: PreTrainedModel, context: int, config: PolicyConfig) -> str:
    """Check on a small twin how the architecture scores; returns the attention that it takes."""
    twin = small_twin(hf)
    if not _scores_the_last_token(twin):
        raise ConfigError(
            f"{type(hf).__name__} does not score a sequence by a linear head `score` on its last token, "
            "so it cannot be trained as a reward model here."
        )
    fix_rotary_frequencies(twin, context)
    if config.dtensor_cfg.pipeline_parallel_size > 1:
        try_division(twin)
    return choose_attention(twin, config, hidden_states)


def hidden_states(hf: PreTrainedModel, model_inputs: dict[str, Any]) -> Tensor:
    """`[b, T, D]` outputs of the body."""
    return hf.base_model(**model_inputs, use_cache=False).last_hidden_state


@torch.no_grad()
def _scores_the_last_token(hf: PreTrainedModel) -> bool:
    """Whether the head on the last hidden state equals the model's own output on a few tokens."""
    head = getattr(hf, "score", None)
    if not isinstance(head, nn.Linear) or hf.base_model is hf:
        return False
    embeddings: Any = hf.get_input_embeddings()
    vocab_size = embeddings.weight.shape[0]
    tokens = (torch.arange(8, device=head.weight.device) * 5 + 1) % vocab_size
    pad = hf.config.get_text_config().pad_token_id
    tokens = torch.where(tokens == pad, (tokens + 1) % vocab_size, tokens)[None]
    own = hf(input_ids=tokens, use_cache=False).logits
    ours = head(hidden_states(hf, {"input_ids": tokens})[:, -1])
    return own.shape == ours.shape == (1, 1) and bool((own - ours).abs() <= 1e-5 * own.abs().clamp(min=1.0))
