"""Repair and complete vLLM's CPU build: rotary embeddings, speculative decoding, experts and float8 inputs.

`rotate_each_head` repairs rotary embeddings of queries with an axis of heads. The kernel takes the distance between two
heads for that between two tokens, so most queries would get the rotation of another position or none (LFM2, and latent
attention without scaled rotary embeddings).

`repair_speculation` repairs four errors of speculative decoding. Without Triton, C++ functions replace vLLM's kernels.

- The function that repeats the temperature, top-k and top-p of each request for its proposed tokens writes into a copy
  that is then dropped, so logits would be divided by uninitialized memory.
- A step in which no request has proposals fails if a request has a top-k.
- A draft model's own output head is treated as equal to the model's, because vLLM compares their weights, which are
  empty after packing.
- vLLM moves a proposal past the end of the context to position 0 without a place in the cache, and the proposal after
  it to position 1, with the place of the prompt's second token. Other requests that share the prompt would then get
  other proposals (`drafting.propose_to_the_end`).

Invariant: after these repairs each token is drawn from the same distribution as without speculation, and proposals
depend only on the tokens of a request.

Expert parallelism is added, because kernel and communicator of the CPU build do not support it.
`vllm.model_executor.layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts.apply` ignores `expert_map`: it gives the
kernel ids among all experts of a layer, but only the weights of this rank's experts, so the kernel reads out of bounds.
`vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator` lacks the two operations that exchange tokens
between replicas. Invariant: the sum of the results of a stage's ranks equals the result of one rank with all experts,
and the result of a token does not depend on other tokens.

`serve_experts_without_gate` adds experts without a gate, which the kernel of the CPU build does not compute.

`round_activations` rounds the inputs of vLLM's linear layers to float8, which vLLM's kernels do not do on CPUs. On GPUs
the kernels quantize the inputs of float8 products in blocks of 1 x 128 values (DeepSeek-V3). Experts are computed in
one kernel, so their inputs are not rounded. These functions run inside vLLM's worker.
"""

from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from nemo_rl.models.quantization import BlockFormat, WeightQuantization, rounded


def rotate_each_head() -> None:
    """Rotate queries and keys `[tokens, heads, size]` as `[tokens, heads * size]`, which vLLM's kernel rotates right.

    On CPUs, call this before vLLM builds its worker.
    """
    kind: Any = RotaryEmbedding
    rotate = kind.forward_cpu
    if rotate.__module__ == __name__:
        return

    def rotate_flat(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        given = (query, key)
        flat = [each.flatten(1) if each is not None and each.dim() == 3 else each for each in given]
        rotated = rotate(self, positions, *flat)
        return tuple(old if old is None else new.view(old.shape) for old, new in zip(given, rotated, strict=True))

    kind.forward_cpu = rotate_flat


def repair_speculation() -> None:
    """Make the repairs in this process, once. On CPUs, call this before vLLM builds its worker."""
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
    """Write the value of each request to the positions of its tokens.

    Args:
        output: `[T]`, where the values are written.
        values: `[B]`, the values of the requests.
        ends: `[B]`, cumulative numbers of tokens.
        replace_from: A value that is replaced by `replace_to`.
        max_num_tokens: Has no effect. It is an argument of vLLM's kernel.
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
    output.copy_(values.where(values != replace_from, replace_to).repeat_interleave(counts))


def compute_own_experts() -> None:
    """Make CPU kernels use only the ids of this process's experts, so that other experts contribute nothing."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe  # vLLM also imports it on CPUs only

    experts: Any = cpu_moe.CPUUnquantizedExperts
    of_all = experts.apply

    @wraps(of_all)
    def of_own(self: Any, **arguments: Any) -> None:
        places = arguments["expert_map"][arguments["topk_ids"].long()]  # [T, top-k]; -1: expert of another rank
        is_own = places >= 0
        arguments["topk_ids"] = places.clamp(min=0).to(arguments["topk_ids"].dtype)
        arguments["topk_weights"] = arguments["topk_weights"] * is_own
        of_all(self, **arguments)
        if arguments["apply_router_weight_on_input"]:  # top-1: the kernel does not apply the weight
            arguments["output"].mul_(is_own)

    experts.apply = of_own


def serve_experts_without_gate() -> None:
    """Let CPUs compute experts of two matrices with a squared ReLU between them (Nemotron-H), which vLLM refuses."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe  # as above
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    gated: Any = cpu_moe.CPUUnquantizedExperts

    class ExpertsWithoutGate(gated):
        _supports_no_act_and_mul = staticmethod(lambda: True)
        _supports_activation = staticmethod(lambda activation: activation is MoEActivation.RELU2_NO_MUL)
        is_supported_config = staticmethod(FusedMoEExperts.is_supported_config)
        process_weights_after_loading = _leave_unpacked
        apply = _compute_without_gate

    config: Any = FusedMoEConfig
    choice: Any = unquantized
    check, kernels = config.__post_init__, choice.backend_to_kernel_cls
    if check.__module__ == __name__:
        return

    def complete_unless_gated(moe: Any) -> None:
        try:
            check(moe)  # it refuses missing gates at its end, when everything is set
        except NotImplementedError:
            if moe.is_act_and_mul:
                raise

    def kernels_and_own(backend: Any) -> list[Any]:
        found: list[Any] = kernels(backend)
        return [*found, ExpertsWithoutGate] if backend is unquantized.UnquantizedMoeBackend.CPU else found

    config.__post_init__ = complete_unless_gated
    choice.backend_to_kernel_cls = kernels_and_own


def _leave_unpacked(self: Any, layer: nn.Module) -> None:
    """Keep the weights of a layer as they were loaded, `[E, inner, outer]` and `[E, outer, inner]`."""


def _compute_without_gate(self: Any, **arguments: Any) -> None:
    """Add the outputs of each token's experts (`CPUUnquantizedExperts.apply`). The sum is in float32."""
    inputs, ids, weights = arguments["hidden_states"], arguments["topk_ids"].long(), arguments["topk_weights"].float()
    if arguments["expert_map"] is not None:
        ids = arguments["expert_map"].long()[ids]  # -1: expert of another rank
    if arguments["apply_router_weight_on_input"]:
        weights = torch.ones_like(weights)
    total = torch.zeros_like(arguments["output"], dtype=torch.float32)
    for expert in ids[ids >= 0].unique().tolist():
        rows, places = (ids == expert).nonzero(as_tuple=True)
        up_bias, down_bias = (None if bias is None else bias[expert] for bias in (self.w1_bias, self.w2_bias))
        inner = functional.linear(inputs[rows], arguments["w1"][expert], up_bias).relu().square()
        outputs = functional.linear(inner, arguments["w2"][expert], down_bias)
        total.index_add_(0, rows, outputs.float() * weights[rows, places, None])
    arguments["output"].copy_(total)


def exchange_tokens() -> None:
    """Let CPU replicas exchange tokens before and after their experts."""
    from vllm.distributed.device_communicators import cpu_communicator  # vLLM also imports it on CPUs only

    communicator: Any = cpu_communicator.CpuCommunicator
    communicator.all_gatherv = _all_gatherv
    communicator.reduce_scatterv = _reduce_scatterv


def _all_gatherv(
    self: Any, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """Concatenate the rows of all members, whose numbers are `sizes` (`DeviceCommunicatorBase.all_gatherv`)."""
    assert dim == 0, "tokens are rows"
    if isinstance(input_, torch.Tensor):
        return _joined(self, input_, sizes)
    return [_joined(self, each, sizes) for each in input_]


def _joined(communicator: Any, own: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
    sizes = sizes or [len(own)] * communicator.world_size
    joined = own.new_empty((sum(sizes), *own.shape[1:]))
    for rank, part in enumerate(joined.split(sizes)):
        if rank == communicator.rank_in_group:
            part.copy_(own)
        dist.broadcast(part, communicator.ranks[rank], group=communicator.device_group)
    return joined


def _reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """Sum the parts of all members for this member's rows (`DeviceCommunicatorBase.reduce_scatterv`).

    The parts are added in the order of the members, so the sum for a token does not depend on its row.
    """
    assert dim == 0, "tokens are rows"
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    parts = [torch.empty_like(input_) for _ in range(self.world_size)]
    dist.all_gather(parts, input_.contiguous(), group=self.device_group)
    own = torch.stack([part.split(sizes)[self.rank_in_group] for part in parts])
    return own.sum(0)


def round_activations(worker: Any, quantization: WeightQuantization) -> int:
    """Round the inputs of all linear layers with quantized weights from now on. Return the number of layers."""
    model: nn.Module = worker.model_runner.get_model()
    found = 0
    for name, module in model.named_modules():
        if isinstance(module, LinearBase) and quantization.takes(f"{name}.weight", (1, 1)):
            module.register_forward_pre_hook(partial(_rounded_input, quantization.activation_format))
            found += 1
    return found


def _rounded_input(block_format: BlockFormat, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    values: Tensor = inputs[0]
    flat = values.reshape(-1, values.shape[-1])
    return rounded(flat, block_format).view_as(values), *inputs[1:]
