"""Time steps of Mamba-2 layers are limited by the configuration, as in engines, and not by `time_step_min`."""

import math

import pytest
import torch
from recurrent_models import recurrent_model
from torch import Tensor
from transformers import AutoConfig

from nemo_rl.models.huggingface.recurrent import time_step_limits, use_configured_time_steps

IDS = torch.arange(3, 40)[None]


def logits(model_type: str, *, corrected: bool, **fields: float) -> Tensor:
    """Return the logits of a model whose time steps are small."""
    model = recurrent_model(model_type, dtype=torch.float64, experts_implementation="eager", **fields)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.fill_(-8.0)
        if corrected:
            use_configured_time_steps(model)
        return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("model_type", ["nemotron_h", "zamba2"])
def test_the_range_of_initial_time_steps_limits_nothing(model_type: str) -> None:
    """With a range from almost 0, transformers' own model limits nothing either."""
    unlimited = logits(model_type, corrected=False, time_step_min=1e-30)
    torch.testing.assert_close(logits(model_type, corrected=True), unlimited, rtol=0, atol=1e-9)
    assert (logits(model_type, corrected=False) - unlimited).abs().max() > 1e-6, "transformers limits them"


@pytest.mark.parametrize("model_type", ["mamba2", "granitemoehybrid", "falcon_h1"])
def test_other_models_stay_as_they_are(model_type: str) -> None:
    assert torch.equal(logits(model_type, corrected=True), logits(model_type, corrected=False))


def test_limits_of_a_configuration_are_kept() -> None:
    assert time_step_limits(AutoConfig.for_model("nemotron_h", time_step_limit=[0.01, 0.1])) == (0.01, 0.1)
    assert time_step_limits(AutoConfig.for_model("nemotron_h")) == (0.0, math.inf)
    assert time_step_limits(AutoConfig.for_model("zamba2")) == (0.0, math.inf)
