"""Repair what vLLM's CPU build computes wrongly in speculative decoding.

Without Triton the build takes C++ functions in place of vLLM's kernels. The function that repeats the temperature,
top-k and top-p of each request for its proposed tokens writes its result into a copy that is then dropped, so logits
would be divided by uninitialized memory. A step in which no request has proposals fails if one has a top-k. And a draft
model's own output head counts as equal to the model's: both have been packed, and what is left of their weights, which
is nothing, is compared.

A fourth repair belongs to `watch.propose_to_the_end`. vLLM moves a proposal past the end of the context to position 0
without a place in the cache, and the proposal after it to position 1 with one, over the second token of the prompt.
Other requests that share the prompt would then get other proposals. Invariant: after these repairs each token is drawn
from the same distribution as without speculation, and proposals depend on the tokens of a request only.
"""

from typing import Any

import torch


def repair_speculation() -> None:
    """Make the repairs in this process, once; call it on CPUs before vLLM builds its worker."""
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode import llm_base_proposer
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    functions: Any = cpu_triton_utils
    sampler: Any = rejection_sampler
    proposers: Any = llm_base_proposer
    proposer_class: Any = SpecDecodeBaseProposer
    if functions._expand_kernel_impl is repeat_for_tokens:
        return
    constrain, share_head = sampler.apply_sampling_constraints, proposer_class._maybe_share_lm_head
    advance = proposers.eagle_step_update_slot_mapping_and_metadata

    def constrain_if_any(logits: torch.Tensor, ends: torch.Tensor, sampling: Any) -> Any:
        return constrain(logits, ends, sampling) if len(logits) else logits

    def share_head_if_none(proposer: Any, target: torch.nn.Module) -> None:
        if not getattr(proposer.model, "has_own_lm_head", False):
            share_head(proposer, target)

    def advance_to_the_end(*, positions_1d: Any, out_clamped_positions: Any, max_model_len: int, **others: Any) -> None:
        is_behind = positions_1d + 1 >= max_model_len
        arguments = {"out_clamped_positions": out_clamped_positions, "max_model_len": max_model_len}
        advance(positions_1d=positions_1d, **arguments, **others)
        out_clamped_positions.masked_fill_(is_behind, max_model_len - 1)

    functions._expand_kernel_impl = repeat_for_tokens
    proposers.eagle_step_update_slot_mapping_and_metadata = advance_to_the_end
    sampler.apply_sampling_constraints = constrain_if_any
    proposer_class._maybe_share_lm_head = share_head_if_none


def repeat_for_tokens(
    output: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    replace_from: float,
    replace_to: float,
    max_num_tokens: int | None = None,
) -> None:
    """Write the value of each request to the places of its tokens.

    Args:
        output: `[T]`, written.
        values: `[B]`, of the requests.
        ends: `[B]`, the number of tokens of all requests up to this one.
        replace_from: a value that is replaced.
        replace_to: the value in its place.
        max_num_tokens: has no effect; vLLM's kernel needs it.
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
    output.copy_(values.where(values != replace_from, replace_to).repeat_interleave(counts))
