"""Metrics of the load of experts."""

import pytest
import torch

from nemo_rl.models.expert_routing import load_metrics

pytestmark = pytest.mark.fast


def test_each_layer_is_reported_only_by_its_position() -> None:
    counts = [torch.tensor([3, 1]), torch.tensor([0, 0]), torch.tensor([4, 0])]
    together = load_metrics(counts)
    assert together == {
        "moe/load_max": 2.0,
        "moe/unused_experts": 0.25,
        "moe/load_entropy": pytest.approx(0.8112781 / 2),
    }
    apart = load_metrics(counts, each_layer=True)
    assert {name: value for name, value in apart.items() if "layer" not in name} == together
    assert apart["moe/layer_0/load_max"] == 1.5 and apart["moe/layer_2/load_max"] == 2.0
    assert apart["moe/layer_2/unused_experts"] == 0.5
    assert not any("layer_1/" in name for name in apart)
