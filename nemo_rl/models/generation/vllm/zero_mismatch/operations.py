"""Replace the operations of vLLM's models on CPUs that round otherwise than the trainer's.

`compute_as_the_trainer` replaces five of them. They differ from the trainer's as follows:

- Matrix products: oneDNN and its packed weights add in an order of their own. `torch.nn.functional.linear` is what the
  trainer's layers call, and `host.row_invariance` makes it independent of the number of rows. Weights stay unpacked.
  Where the trainer's tensor-parallel ranks divide the inputs of a layer, `linear_in_parts` adds their parts.
- Rotary embeddings: vLLM's kernel rounds once. transformers rounds each product and their sum.
- Norms: vLLM norms the sum of a layer's output and the residual before it is rounded. transformers rounds the sum.
- Attention (`paged_attention`).
- Log-probabilities: the trainer widens logits before scale and cap, and subtracts one normalizer.

The types of `check.TYPES_OF_TRANSFORMERS` are computed with the modules of transformers (`trainer_modules`), so their
rotary embeddings and norms are the trainer's. Invariant: with `host.row_invariance.compute_rows_alike`, the
log-probability of a token has the bits of the trainer's, for the models that `check.PROVEN_TYPES` names. These
functions run in vLLM's worker.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from nemo_rl.distributed.parallel_logprobs.density import whole_logprobs
from nemo_rl.host.row_invariance import linear_in_parts
from nemo_rl.models.generation.vllm.zero_mismatch.paged_attention import TrainerAttentionBackend
from nemo_rl.models.generation.vllm.zero_mismatch.trainer_modules import keep_trainer_modules


def compute_as_the_trainer() -> None:
    """Replace the operations in this process, once, before vLLM builds its worker."""
    utils: Any = layer_utils
    if utils.dispatch_cpu_unquantized_gemm is keep_unpacked:
        return
    utils.dispatch_cpu_unquantized_gemm = keep_unpacked
    rotary: Any = RotaryEmbedding
    rotary.forward_cpu = rotary.forward_native
    for norm in (RMSNorm, GemmaRMSNorm):
        _round_before(norm)
    backend = TrainerAttentionBackend
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{backend.__module__}.{backend.__qualname__}")
    _widen_logits()
    _normalize_as_the_trainer()
    keep_trainer_modules()


def keep_unpacked(layer: Any, remove_weight: bool) -> None:
    """Let a layer multiply with its weight as it was loaded (`dispatch_cpu_unquantized_gemm`)."""
    layer.cpu_linear = linear_in_parts if isinstance(layer, RowParallelLinear) else functional.linear


def _round_before(norm_class: Any) -> None:
    """Let a norm add the residual in the number format of the layer's output, and norm the rounded sum."""
    norm = norm_class.forward_native

    def norm_of_sum(self: nn.Module, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return norm(self, x)
        total = x + residual
        return norm(self, total), total

    norm_class.forward_native = norm_of_sum


def _widen_logits() -> None:
    """Convert logits to float32 before they are scaled and capped."""
    processor: Any = LogitsProcessor
    of_head = processor._get_logits

    def widened(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor | None:
        logits: Tensor | None = of_head(self, *args, **kwargs)
        return None if logits is None else logits.float()

    processor._get_logits = widened


def _normalize_as_the_trainer() -> None:
    """Compute log-probabilities of greedy and sampled tokens with the trainer's normalizer."""
    greedy: Any = Sampler
    sampler: Any = TopKTopPSampler
    sample = sampler.forward_cpu

    def sample_normalized(
        self: Any, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        sampled, logprobs = sample(self, logits, generators, k, p)
        if logprobs is None or self.logprobs_mode != "processed_logprobs":
            return sampled, logprobs
        return sampled, whole_logprobs(logits.masked_fill(logprobs.isneginf(), float("-inf")))

    greedy.compute_logprobs = staticmethod(whole_logprobs)
    sampler.forward_cpu = sample_normalized
