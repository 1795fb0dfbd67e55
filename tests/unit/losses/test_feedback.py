"""KTO against its formula written out with `math`, and the baseline of its batches."""

import math

import pytest
import torch
from loss_batches import random_batch

from nemo_rl.algorithms.kto import KTOPreparation, kl_estimate, mismatched_rows, rotation
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.invariance import check_invariance
from nemo_rl.losses.preference import KTOLossConfig, KTOLossFn

pytestmark = pytest.mark.fast

B, T, BETA, BASELINE = 6, 7, 0.3, 0.4
DESIRABLE = [1, 0, 1, 1, 0, 0]
COUNTS = [1, 1, 1, 0, 1, 1]
LOSS = KTOLossFn(KTOLossConfig(reference_policy_kl_penalty=BETA, desirable_weight=1.3, undesirable_weight=0.7))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def kto_batch():
    logprobs, data = random_batch(B, T, masked_rows=[COUNTS.index(0)])
    data |= {
        "desirable": torch.tensor(DESIRABLE, dtype=torch.float64),
        "kl_baseline": torch.full((B,), BASELINE, dtype=torch.float64),
        "num_desirable": torch.full((B,), 2.0, dtype=torch.float64),
    }
    return logprobs, data


def reference(logprobs, data):
    """Return (loss, log-ratio of each unmasked row) from the paper, row by row."""
    total, rewards = 0.0, {}
    for row in range(B):
        if not COUNTS[row]:
            continue
        ratio = sum(
            float(logprobs[row, t] - data["reference_policy_logprobs"][row, t + 1])
            for t in range(T - 1)
            if data["token_mask"][row, t + 1]
        )
        rewards[row] = ratio
        if DESIRABLE[row]:
            total += 1.3 * (1 - sigmoid(BETA * (ratio - BASELINE)))
        else:
            total += 0.7 * (1 - sigmoid(BETA * (BASELINE - ratio)))
    return total / sum(COUNTS), rewards


def test_kto_loss_gradient_and_metrics_equal_the_formula():
    logprobs, data = kto_batch()
    leaf = logprobs.clone().requires_grad_(True)
    loss, metrics = LOSS(leaf, data=data, global_valid_seqs=5, global_valid_toks=0)
    loss.backward()
    expected, rewards = reference(logprobs, data)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    for row in range(B):
        step = torch.zeros_like(logprobs)
        step[row, 1] = 1e-6
        slope = (reference(logprobs + step, data)[0] - reference(logprobs - step, data)[0]) / 2e-6
        assert leaf.grad[row, 1].item() == pytest.approx(slope, abs=1e-8)
    good = [reward for row, reward in rewards.items() if DESIRABLE[row]]
    bad = [reward for row, reward in rewards.items() if not DESIRABLE[row]]
    right = sum((reward > BASELINE) == bool(DESIRABLE[row]) for row, reward in rewards.items())
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {
            "loss": expected,
            "accuracy": right / 5,
            "kl_baseline": BASELINE,
            "rewards_chosen_mean": sum(good) / 2,
            "rewards_rejected_mean": sum(bad) / 3,
            "rewards_margin_mean": sum(good) / 2 - sum(bad) / 3,
            "num_valid_samples": 5,
        },
        rel=1e-12,
    )
    check_invariance(LOSS, logprobs, data)


def test_masked_rows_change_nothing():
    logprobs, data = kto_batch()
    expected = LOSS(logprobs, data=data, global_valid_seqs=5)[0]
    logprobs[3] = torch.nan
    leaf = logprobs.requires_grad_(True)
    loss, _ = LOSS(leaf, data=data, global_valid_seqs=5)
    loss.backward()
    assert loss.item() == expected.item()
    assert torch.isfinite(leaf.grad).all()


def rows(*texts):
    """Make a batch of `prompt|answer`, one character per token; rows that start with "-" are masked."""
    pairs = [text.lstrip("-").split("|") for text in texts]
    width = max(len(a) + len(b) for a, b in pairs)
    ids, mask = torch.zeros(len(texts), width, dtype=torch.int64), torch.zeros(len(texts), width)
    for row, (prompt, answer) in enumerate(pairs):
        ids[row, : len(prompt + answer)] = torch.tensor([ord(c) for c in prompt + answer])
        mask[row, len(prompt) : len(prompt + answer)] = 1
    return BatchedDataDict(
        input_ids=ids,
        token_mask=mask,
        input_lengths=torch.tensor([len(a) + len(b) for a, b in pairs]),
        sample_mask=torch.tensor([0.0 if text.startswith("-") else 1.0 for text in texts]),
        desirable=torch.tensor([1.0, 0.0] * len(texts))[: len(texts)],
    )


def texts_of(batch):
    out = []
    for ids, mask, length in zip(batch["input_ids"], batch["token_mask"], batch["input_lengths"], strict=True):
        text = "".join(chr(i) for i in ids[:length])
        start = int(length - mask.sum())
        assert mask[start:length].all() and not mask[:start].any() and not mask[length:].any()
        out.append(f"{text[:start]}|{text[start:]}")
    return out


def test_each_prompt_is_paired_with_the_answer_to_another():
    batch = rows("ab|1", "ab|22", "-zz|9", "c|333", "c|4")
    assert texts_of(mismatched_rows(batch, 10)) == ["ab|333", "ab|4", "c|1", "c|22"]
    assert texts_of(mismatched_rows(batch, 3)) == ["ab|3", "ab|4", "c|1", "c|22"]
    assert mismatched_rows(rows("ab|1", "-c|2"), 10).size == 0


def test_rotation_leaves_as_few_rows_in_place_as_possible():
    assert rotation([]) == rotation(["a"]) == 0
    assert rotation(["a", "b", "c"]) == 1
    assert rotation(["a", "a", "b", "a"]) in (1, 2, 3)
    assert rotation(["a", "a"]) == 1


class LetterPolicy:
    """Scores a token by its character code alone; the reference scores every token -1."""

    def get_logprobs(self, batch):
        assert "desirable" not in batch
        return {"logprobs": batch["input_ids"] / -100.0}

    def get_reference_policy_logprobs(self, batch):
        return {"reference_logprobs": torch.full(batch["input_ids"].shape, -1.0)}


def test_preparation_adds_baseline_and_counts_as_columns():
    batch = rows("ab|1", "ab|22", "-zz|9", "c|333", "c|4")
    prepared = StepBatch(batch)
    assert KTOPreparation(LetterPolicy(), 10).apply(prepared) == {}
    prepared = prepared.tensors
    ratios = [len(a) * (1 - ord(a[0]) / 100) for a in ("333", "4", "1", "22")]
    assert prepared["kl_baseline"].tolist() == pytest.approx([sum(ratios) / 4] * 5)
    assert prepared["num_desirable"].tolist() == [2.0 - 1 + 1] * 5
    assert prepared["reference_policy_logprobs"].shape == prepared["input_ids"].shape
    alone = rows("ab|1", "-c|2")
    KTOPreparation(LetterPolicy(), 10).prepare(alone)
    assert alone["kl_baseline"].tolist() == [0.0, 0.0]


def test_the_baseline_is_never_negative():
    low, high, mask = torch.full((2, 3), -2.0), torch.full((2, 3), -1.0), torch.tensor([[0, 1, 1], [0, 1, 0]])
    assert kl_estimate(high, low, mask) == pytest.approx(1.5)
    assert kl_estimate(low, high, mask) == 0.0
