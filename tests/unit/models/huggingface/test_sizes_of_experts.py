"""Experts of any size can be trained: grouped products, which need rows of 16 bytes, are not used for other sizes."""

import pytest
import torch
from architectures import random_model

from nemo_rl.models.huggingface.load import load_causal_lm


@pytest.mark.parametrize(("width", "chosen"), [(46, "eager"), (48, "grouped_mm")])
def test_sizes_that_grouped_products_do_not_support_are_computed_one_after_the_other(width, chosen, tmp_path) -> None:
    random_model("qwen3_moe", moe_intermediate_size=width).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path))
    assert model.config._experts_implementation == chosen
    tokens = torch.arange(3, 15)[None]
    model(input_ids=tokens, use_cache=False).logits.sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters() if parameter.grad is not None)
