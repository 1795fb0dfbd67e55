"""Find the operations between a model's linear head and its logits, and compute logits with them.

Configurations describe these operations under different names, or not at all, so `find_transform` compares each
operation that the configuration suggests with the model's own logits. The comparison includes logits that are large
enough for an effect of soft-capping.

`last_logits` computes an engine's logits with the functions of the training backend, so that both have the same bits: a
model's own forward rounds scales and caps to the number format of its weights.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.distributed.parallel_logprobs import LogitTransform
from nemo_rl.distributed.parallel_logprobs.head import HeadUpdate, OutputHead
from nemo_rl.models.huggingface.layers import body, hidden_states

_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")

_PROBED_LOGIT = 100.0
"""Largest logit of the comparison. Usual caps are 15 to 50, and a cap of 1000 still changes such a logit by 0.3 %."""


@torch.no_grad()
def find_transform(hf: PreTrainedModel) -> LogitTransform | None:
    """Return the operations after the linear head, or None if no known transform gives the model's logits.

    Args:
        hf: the unsharded model with real weights, trained or random.
    """
    head = hf.get_output_embeddings()
    if not isinstance(head, nn.Linear) or body(hf) is hf:
        return None
    was_training = hf.training
    hf.eval()
    tokens = (torch.arange(8, device=head.weight.device) * 5 + 1)[None] % head.weight.shape[0]
    hidden = hidden_states(hf, {"input_ids": tokens})
    factor = _PROBED_LOGIT / head(hidden).abs().max().clamp(min=1e-6).item()
    enlarged = head.register_forward_pre_hook(lambda module, args: (args[0] * factor,))
    try:
        own = hf(input_ids=tokens, use_cache=False).logits
        linear = head(hidden)
    finally:
        enlarged.remove()
        hf.train(was_training)
    return next((found for found in _suggested(hf) if _equal(found.apply_(linear.clone()), own)), None)


def _suggested(hf: PreTrainedModel) -> Iterator[LogitTransform]:
    """Yield every combination of the configured scales and caps. The last combination has none of them."""
    config = hf.config.get_text_config()

    def values(names: tuple[str, ...]) -> list[float]:
        found: list[Any] = [getattr(config, name, None) for name in names]
        return [float(value) for value in found if isinstance(value, int | float) and value > 0]

    scales = [*values(_MULTIPLIERS), *(1 / value for value in values(_DIVISORS)), 1.0]
    for cap, scale in itertools.product([*values(_CAPS), None], scales):
        yield LogitTransform(scale, cap)


def _equal(ours: Tensor, own: Tensor) -> bool:
    """Return whether two sets of logits differ by rounding only."""
    tolerance = 1e-5 * own.abs().max().clamp(min=1e-6).item()
    return own.shape == ours.shape and bool((own - ours).abs().max() <= tolerance)


def last_logits(
    hf: PreTrainedModel,
    model_inputs: dict[str, Any],
    last: Tensor,
    transform: LogitTransform | None,
    update_of: Callable[[nn.Module, Tensor], HeadUpdate | None] = lambda head, hidden: None,
) -> Tensor:
    """Return the `[b, V]` logits of one packed row at the indices `last`, as the training backend computes them.

    Args:
        hf: the whole model.
        model_inputs: the model's keyword arguments; `input_ids` is `[1, T]`.
        last: `[b]` indices of tokens.
        transform: result of `find_transform`. If it is None, the model's own forward computes the logits.
        update_of: function that returns the adapter's update of the head for hidden states `[b, D]`, or None.
    """
    if transform is None:
        logits: Tensor = hf(**model_inputs, use_cache=False, logits_to_keep=last).logits[0]
        return logits
    head: Any = hf.get_output_embeddings()
    hidden_bD = hidden_states(hf, model_inputs)[0, last]
    return OutputHead(head.weight, head.bias, transform).logits(hidden_bD, update_of(head, hidden_bD))
