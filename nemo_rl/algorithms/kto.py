"""Set up Kahneman-Tversky optimisation (KTO): training on single answers labelled desirable or undesirable.

KTO is a loss of DPO runs (`dpo.preference_loss=kto`). Its batches also hold reference log-probabilities and the
baseline z0, an estimate of how far the policy has moved from the reference. Invariant: the baseline is computed once
for the global batch, before the batch is divided for training. No gradient flows through it.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.recipe import Recipe
from nemo_rl.algorithms.runtime.run import Stage, StepBatch
from nemo_rl.algorithms.setup.user_parts import NOTHING, UserParts
from nemo_rl.algorithms.supervised import collate_by, from_section
from nemo_rl.config import DPOMasterConfig, Role
from nemo_rl.data.collate_fn import feedback_collate_fn
from nemo_rl.data.datasets.setup import setup_feedback_data
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.preference import KTOLossConfig, KTOLossFn
from nemo_rl.losses.reductions import masked_sum
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.models.policy.lm_policy import Policy

type Batch = BatchedDataDict[Any]


def recipe(config: DPOMasterConfig, tokenizer: PreTrainedTokenizerBase, user_parts: UserParts = NOTHING) -> Recipe:
    """Build the recipe of KTO without starting anything. `user_parts` are the parts that the caller passes."""

    def stages(models: Mapping[str, Policy]) -> list[Stage]:
        return [KTOPreparation(models["policy"], config.policy.max_total_sequence_length)]

    return Recipe(
        tokenizer=tokenizer,
        data=user_parts.data(config, lambda: setup_feedback_data(tokenizer, config.data)),
        collate=collate_by(feedback_collate_fn, config.policy, tokenizer),
        loss_fn=user_parts.loss(KTOLossFn(from_section(KTOLossConfig, config.dpo)), config.loss_fn),
        roles=config.models | {"policy": Role(config.policy, keeps_reference=True)},
        stages=stages,
    )


@dataclass(frozen=True)
class KTOPreparation:
    """Stage that adds what `KTOLossFn` needs to a batch of B rows (`runtime.run.Stage`).

    z0 = max(0, mean over rows of log pi(y'|x) - log pi_reference(y'|x)), arXiv 2402.01306, section 4.1, where y' is
    the answer of another row of the batch.
    """

    policy: PolicyInterface
    """The trained policy, which keeps its initial weights."""
    max_length: int
    """Number of tokens of the longest row. A prompt joined with another row's answer is cut to this length."""
    name = "policy_and_reference_logprobs"
    roles = ("policy",)

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Write `reference_policy_logprobs [B, T]`, `kl_baseline [B]` and `num_desirable [B]`."""
        self.prepare(batch.tensors)
        return {}

    def prepare(self, batch: Batch) -> None:
        """Prepare a batch of tensors as in `apply`."""
        others = mismatched_rows(batch, self.max_length)
        num_rows, width = batch["input_ids"].shape
        scores = self.policy.get_reference_policy_logprobs(_stacked(batch, others))["reference_logprobs"]
        batch["reference_policy_logprobs"] = scores[:num_rows, :width]
        baseline = 0.0
        if others.size:
            current = self.policy.get_logprobs(others)["logprobs"]
            reference = scores[num_rows:, : current.shape[1]]
            baseline = kl_estimate(current, reference, others["token_mask"])
        batch["kl_baseline"] = torch.full((num_rows,), baseline)
        batch["num_desirable"] = (batch["desirable"] * batch["sample_mask"]).sum().repeat(num_rows)


def kl_estimate(current_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor) -> float:
    """Return `max(0, mean over rows of the sum over tokens of current - reference)`."""
    log_ratio_B = masked_sum(current_BT.double() - reference_BT.double(), mask_BT.double(), dim=-1)
    return max(0.0, log_ratio_B.mean().item())


def mismatched_rows(batch: Batch, max_length: int) -> Batch:
    """Join the prompt of each row that counts with the answer of another row that counts.

    Args:
        batch: `input_ids` and `token_mask` `[B, T]`, `input_lengths` and `sample_mask` `[B]`. The answer of a row
            begins with its first token that counts.
        max_length: Number of tokens to which joined rows are cut.

    Returns:
        `input_ids`, `token_mask` and `input_lengths`, without rows if fewer than two rows count.
    """
    prompts: list[Tensor] = []
    answers: list[Tensor] = []
    masks: list[Tensor] = []
    for row, length in enumerate(batch["input_lengths"].tolist()):
        mask = batch["token_mask"][row, :length]
        if batch["sample_mask"][row] == 0 or not mask.any():
            continue
        start = int((mask > 0).int().argmax())
        prompts.append(batch["input_ids"][row, :start])
        answers.append(batch["input_ids"][row, start:length])
        masks.append(mask[start:])
    shift = rotation([tuple(prompt.tolist()) for prompt in prompts])
    if shift == 0:
        return batch.slice(0, 0)
    sources = [(row + shift) % len(prompts) for row in range(len(prompts))]
    ids = [torch.cat([prompts[row], answers[source]]) for row, source in enumerate(sources)]
    counts = [torch.cat([torch.zeros(len(prompts[row])), masks[source]]) for row, source in enumerate(sources)]
    return BatchedDataDict(
        input_ids=_padded([row[:max_length] for row in ids]),
        token_mask=_padded([row[:max_length] for row in counts]),
        input_lengths=torch.tensor([min(len(row), max_length) for row in ids], dtype=torch.int64),
    )


def rotation(keys: Sequence[Hashable]) -> int:
    """Return the smallest rotation that changes the key at as many places as possible, or 0 for fewer than two keys.

    Example:
        >>> rotation(["a", "a", "b", "b"])
        2
    """
    best, most = 0, -1
    for shift in range(1, len(keys)):
        changed = sum(keys[i] != keys[(i + shift) % len(keys)] for i in range(len(keys)))
        if changed > most:
            best, most = shift, changed
        if changed == len(keys):
            break
    return best


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _stacked(first: Batch, second: Batch) -> Batch:
    """Concatenate the rows of two batches for scoring, padded to the same length."""
    if not second.size:
        return first
    width = max(batch["input_ids"].shape[1] for batch in (first, second))
    parts = [batch["input_ids"] for batch in (first, second)]
    return BatchedDataDict(
        input_ids=torch.cat([pad(ids, (0, width - ids.shape[1])) for ids in parts]),
        input_lengths=torch.cat([batch["input_lengths"] for batch in (first, second)]),
    )
