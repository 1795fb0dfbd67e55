"""Validation of reward models: how many rows a pass of a rank has."""

import pytest
import torch

from nemo_rl.algorithms.rm import RMValidator
from nemo_rl.algorithms.supervised import validation_rows
from nemo_rl.config import RMMasterConfig, load_config
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.preference import CentredMargin, PreferenceLossFn

pytestmark = pytest.mark.fast


class LengthScorer:
    """Scores a sequence by its length, and notes the pass sizes that are asked for."""

    def __init__(self) -> None:
        self.passes: list[int | None] = []

    def score(self, data, micro_batch_size=None):
        self.passes.append(micro_batch_size)
        return BatchedDataDict({"scores": data["input_lengths"].float()})


def test_a_pass_has_val_micro_batch_size_pairs() -> None:
    overrides = ["rm.val_micro_batch_size=3", "policy.sequence_packing.enabled=false"]
    config = load_config("examples/configs/rm_cpu.yaml", overrides, RMMasterConfig)
    rows = validation_rows(config.policy, config.rm, 2)
    assert rows == 6
    batch = BatchedDataDict({"input_lengths": torch.tensor([5, 3, 2, 4]), "sample_mask": torch.ones(4)})
    scorer = LengthScorer()
    metrics = RMValidator([batch], scorer, PreferenceLossFn(CentredMargin(0.0, 0.0)), rows)(step=1)
    assert scorer.passes == [6]
    assert metrics["accuracy"] == 0.5
