"""No tensor on a path of training or scoring has the size of all logits: every allocation is watched."""

import itertools
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from allocations import Allocations
from architectures import random_model
from policy_helpers import policy_config, process_group, run_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nemo_rl.config import ClippedPGLossConfig, DistillationLossConfig, PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_logprobs import LogitTransform, SamplingDensity, token_logprobs
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.losses.preference import DPOLossConfig, DPOLossFn
from nemo_rl.losses.supervised import DistillationLossFn, NLLLossFn
from nemo_rl.models.dtensor import build
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker

CPU = torch.device("cpu")
B, T, V, K, CHUNK = 4, 48, 997, 5, 16
NUM_LOGITS = B * (T - 1) * V
"""Of the tokens that are scored in one microbatch."""
ALLOWED = NUM_LOGITS // 4
"""A chunk of logits has a twelfth; everything else is smaller: weights, attention, several targets at a token."""

LAYOUTS = {
    "padded": {"train_micro_batch_size": B, "logprob_batch_size": B},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": B * T, "logprob_mb_tokens": B * T}},
}
LOSSES = {
    "sft": NLLLossFn(),
    "grpo": ClippedPGLossFn(ClippedPGLossConfig.build(reference_policy_kl_penalty=0.1)),
    "dpo": DPOLossFn(
        DPOLossConfig(
            reference_policy_kl_penalty=0.3,
            preference_loss_weight=1.0,
            sft_loss_weight=0.2,
            preference_average_log_probs=False,
            sft_average_log_probs=True,
        )
    ),
    "distillation": DistillationLossFn(DistillationLossConfig.build(kl_type="mixed", zero_outside_topk=True)),
}
MODELS = {
    "plain": ("qwen2", "padded", {}),
    "packed": ("qwen2", "packed", {}),
    "soft-capped": ("gemma2", "padded", {"final_logit_softcapping": 5.0}),
    "scaled": ("cohere2", "padded", {}),
}


def full_batch() -> BatchedDataDict[Any]:
    """Make rows without padding; all tokens but the first are unmasked."""
    gen = torch.Generator().manual_seed(0)
    token_mask = torch.ones(B, T)
    token_mask[:, 0] = 0
    logprobs = {
        name: -torch.rand(B, T, generator=gen)
        for name in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    }
    return BatchedDataDict(
        {
            "input_ids": torch.randint(3, V, (B, T), generator=gen),
            "input_lengths": torch.full((B,), T),
            "token_mask": token_mask,
            "sample_mask": torch.ones(B),
            "advantages": torch.randn(B, 1, generator=gen).expand(B, T).contiguous(),
            **logprobs,
        }
    )


def passes(config: PolicyConfig) -> Allocations:
    """Score, request the largest logits, and train one step with each loss."""
    data = full_batch()
    with process_group():
        worker = PolicyWorker(DTensorBackend(config, CPU), config)
        with Allocations() as made:
            for score in (worker.get_logprobs, worker.get_reference_policy_logprobs):
                assert score(data, [B]).shape == (B, T)
            data["teacher_topk_logits"], data["teacher_topk_indices"] = worker.get_topk_logits(data, [B], K)
            for loss_fn in LOSSES.values():
                group = loss_fn.rows_per_unit
                batch = shard_batch(data, 1, training_strategy(config, None, group), group)
                result = worker.train(batch.data[0], batch.sizes[0], loss_fn, count_valid(data))
                assert result.grad_norm > 0 and not result.skipped
    return made


def small_config(folder: Path, model: str, **values: Any) -> PolicyConfig:
    arch, layout, special = MODELS[model]
    small = {"vocab_size": V, "hidden_size": 16, "num_attention_heads": 2, "head_dim": 8, "num_key_value_heads": 2}
    random_model(arch, **small, **special).save_pretrained(folder)
    return policy_config(str(folder), **LAYOUTS[layout], logprob_chunk_size=CHUNK, train_global_batch_size=B, **values)


@pytest.mark.parametrize("filters", [{}, {"top_k": 50, "top_p": 0.9}], ids=["softmax", "filtered"])
@pytest.mark.parametrize("model", MODELS)
def test_no_tensor_has_the_size_of_all_logits(model, filters, tmp_path) -> None:
    made = passes(small_config(tmp_path, model, generation={"temperature": 0.7, **filters}))
    assert CHUNK * V <= made.largest < ALLOWED, made.where


def test_the_watcher_finds_the_full_logits_of_a_plain_forward(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(build, "find_transform", lambda hf: None)
    assert passes(small_config(tmp_path, "plain")).largest >= NUM_LOGITS


def full_way(hidden: Tensor, weight: Tensor, targets: Tensor, transform: LogitTransform, temperature: float) -> None:
    logits = transform.scale * (hidden @ weight.t())
    if transform.cap is not None:
        logits = transform.cap * torch.tanh(logits / transform.cap)
    F.log_softmax(logits / temperature, -1).gather(-1, targets[:, None]).sum().backward()


def in_chunks(hidden: Tensor, weight: Tensor, targets: Tensor, transform: LogitTransform, temperature: float) -> None:
    density = SamplingDensity(temperature)
    token_logprobs(hidden, weight, targets, density=density, transform=transform)[0].sum().backward()


def large_head(width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make hidden states of 4 rows of 4096 tokens, 32768 words, and targets."""
    hidden, weight = (torch.randn(n, width, requires_grad=True) for n in (4 * 4096, 32768))
    return hidden, weight, torch.zeros(4 * 4096, dtype=torch.int64)


WAYS = (full_way, in_chunks)
TRANSFORMS = {"plain": LogitTransform(), "capped": LogitTransform(0.5, 30.0)}


def _peaks(rank: int, world_size: int) -> dict[str, list[int]]:
    """Return bytes by transform and temperature, for each of the two ways.

    In a process of its own: a backward pass of fake tensors starts threads, after which nothing can be forked.
    """
    peaks: dict[str, list[int]] = {}
    for name, temperature, way in itertools.product(TRANSFORMS, (1.0, 0.7), WAYS):
        with FakeTensorMode():
            head = large_head(width=256)
            with Allocations() as made:
                way(*head, TRANSFORMS[name], temperature)
        peaks.setdefault(f"{name} {temperature}", []).append(made.peak_bytes)
    return peaks


def test_log_probs_take_a_fraction_of_the_memory_of_full_logits() -> None:
    """Forward and backward, by the sizes of fake tensors."""
    (peaks,) = run_ranks(_peaks, 1)
    assert len(peaks) == 4
    for full, chunked in peaks.values():
        assert full > 2 * 4 * 4096 * 32768 * 4
        assert chunked < full / 5, peaks


def _resident_peak(rank: int, world_size: int, way: int) -> int:
    """Return the KiB that log-probabilities and their gradients add to this process at their peak."""
    head = large_head(width=64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    WAYS[way](*head, LogitTransform(), 1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


@pytest.mark.long
def test_measured_memory_of_log_probs_is_a_fraction_of_full_logits() -> None:
    (full,), (chunked,) = (run_ranks(_resident_peak, 1, way) for way in range(2))
    assert full > 2 * 4 * 4096 * 32768 * 4 / 1024
    assert chunked < full / 5, (chunked, full)
