"""Fix rotary frequencies so that they do not depend on other rows of a batch.

For long-rope and dynamic NTK scaling, transformers chooses the frequencies of a whole batch by its longest row. A row
longer than the model's original context would change the log-probabilities of all other rows. vLLM chooses frequencies
once, by its `max_model_len`. This module also chooses them once, so that trainer and engine agree.

Invariant: after `fix_rotary_frequencies` the frequencies depend only on the model and the configuration of the run.
"""

import logging
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.utils.errors import ConfigError

logger = logging.getLogger(__name__)


def fix_rotary_frequencies(hf: PreTrainedModel, context: int) -> None:
    """Choose the frequencies for all sequences of the run, in place. Most models have only one possible choice.

    Args:
        context: largest number of tokens of a sequence in the run.

    Raises:
        ConfigError: beyond the model's original context, the frequencies of a row would depend on other rows.
    """
    for module in hf.modules():
        kinds = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in by_layer.items():
            if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind):
                _fix(hf, module, layer_type, kind, context)


def _fix(hf: PreTrainedModel, module: Any, layer_type: str | None, kind: str, context: int) -> None:
    """Choose the frequencies of one rotary embedding, or of one type of layers in it."""
    parameters = module.config.rope_parameters if layer_type is None else module.config.rope_parameters[layer_type]
    given = {} if layer_type is None else {"layer_type": layer_type}
    original = module.config.max_position_embeddings
    if kind == "longrope":
        original = parameters["original_max_position_embeddings"]
    if kind == "longrope" and context > original:
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        device = getattr(module, name).device
        long_frequencies, _ = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=original + 1, **given)
        setattr(module, name, long_frequencies)
        logger.warning(
            "Sequences of up to %d tokens: %s takes its long-rope factors for all of them, as vLLM does. For the "
            "short factors keep policy.max_total_sequence_length at %d or below.",
            context,
            type(hf).__name__,
            original,
        )
    if kind == "longrope" or context <= original:
        if layer_type is None:  # transformers never recomputes frequencies of the type "default"
            module.rope_type = "default"
        else:
            module.rope_type[layer_type] = "default"
    if context > original and not _ignores_other_rows(module, context, given):
        raise ConfigError(
            f"{type(hf).__name__} changes its rotary frequencies ({kind}) with the longest row of a batch beyond "
            f"{original} tokens, so log-probabilities would depend on the other rows. Set "
            f"policy.max_total_sequence_length to at most {original}; it is {context}."
        )


@torch.no_grad()
def _ignores_other_rows(module: Any, context: int, given: dict[str, str]) -> bool:
    """Return whether the rotation of a short row is the same alone and next to a row as long as the context."""
    short, long = torch.arange(2), torch.tensor([0, context - 1])
    x = torch.zeros(2, 2, 1)
    alone = module(x[:1], short[None], **given)
    batched = module(x, torch.stack([short, long]), **given)
    return all(torch.equal(one[0], other[0]) for one, other in zip(alone, batched, strict=True))
