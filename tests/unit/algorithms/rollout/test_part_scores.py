"""The whole batch has the scores that its parts had."""

from typing import Any

import pytest
import torch

from nemo_rl.algorithms.rollout.part_scores import KeptScores, PartScores, ScoringParts
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

pytestmark = pytest.mark.fast


class CountingModel:
    """Scores each token by its id and the call that scored it."""

    def __init__(self) -> None:
        self.calls = 0

    def get_logprobs(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        self.calls += 1
        return BatchedDataDict({"logprobs": data["input_ids"].float() + 0.001 * self.calls})

    def get_reference_policy_logprobs(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        return BatchedDataDict({"reference_logprobs": -data["input_ids"].float()})

    def get_topk_logits(
        self, data: BatchedDataDict[Any], k: int, *, vocab_size: int | None = None
    ) -> BatchedDataDict[Any]:
        ids = data["input_ids"]
        return BatchedDataDict(
            {"topk_logits": ids.float()[..., None].repeat(1, 1, k), "topk_indices": ids[..., None].repeat(1, 1, k)}
        )


def rows(*texts: list[int]) -> BatchedDataDict[Any]:
    width = max(len(text) for text in texts)
    padded = [[*text, *[0] * (width - len(text))] for text in texts]
    return BatchedDataDict(input_ids=torch.tensor(padded), input_lengths=torch.tensor([len(text) for text in texts]))


def test_a_whole_batch_has_the_scores_of_its_parts_whatever_their_order_and_width() -> None:
    model, scores = CountingModel(), PartScores()
    parts = ScoringParts(model, scores)
    first, second = rows([5, 6, 7], [8, 9]), rows([4])
    for part in (first, second):
        parts.get_logprobs(part)
        parts.get_reference_policy_logprobs(part)
        parts.get_topk_logits(part, 2)
    whole, kept = rows([4], [8, 9], [5, 6, 7]), KeptScores(scores)
    expected = torch.tensor([[4.002, 0, 0], [8.001, 9.001, 0], [5.001, 6.001, 7.001]])
    assert torch.equal(kept.get_logprobs(whole)["logprobs"], expected)
    reference = kept.get_reference_policy_logprobs(whole)["reference_logprobs"]
    assert torch.equal(reference, -whole["input_ids"].float())
    topk = kept.get_topk_logits(whole, 2)
    assert topk["topk_indices"].dtype == torch.int64
    assert topk["topk_indices"][:, :, 1].tolist() == whole["input_ids"].tolist()
    assert model.calls == 2


def test_rows_with_the_same_tokens_and_other_inputs_are_different_rows() -> None:
    scores = PartScores()
    parts = ScoringParts(CountingModel(), scores)
    images = [{"pixel_values": torch.tensor([1.0])}, {"pixel_values": torch.tensor([2.0])}]
    for image in images:
        parts.get_logprobs(BatchedDataDict(rows([3]), row_inputs=[image]))
    whole = BatchedDataDict(rows([3], [3]), row_inputs=images[::-1])
    assert KeptScores(scores).get_logprobs(whole)["logprobs"].tolist() == pytest.approx(
        torch.tensor([[3.002], [3.001]])
    )
