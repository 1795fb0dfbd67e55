"""Experts of rows are laid out like their tokens: padded, packed, with shared prompts; padding falls back."""

import numpy as np
import pytest
import torch
from policy_helpers import random_batch

from nemo_rl.data.packing import SHARED_PREFIXES, column_of
from nemo_rl.data.routed_experts import ROUTED_EXPERTS, experts_dtype, with_unreported
from nemo_rl.models.batch_rows import BatchRows
from nemo_rl.models.expert_routing import is_reported
from nemo_rl.models.training.inputs import InputLayout, build_training_inputs

CPU = torch.device("cpu")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_each_token_has_its_experts(packed: bool, shared: bool) -> None:
    """The experts of a token are its id here, so those of the layout must be the ids of the layout."""
    data = random_batch(rows=4)
    if shared:
        data["input_ids"][1:3, :16] = data["input_ids"][0, :16]
        data["prompt_groups"] = torch.tensor([0, 0, 0, 1])
    real = torch.arange(24)[None] < data["input_lengths"][:, None]
    data[ROUTED_EXPERTS] = data["input_ids"].where(real, -1)[..., None, None].expand(-1, -1, 3, 2).to(torch.int8)
    data[ROUTED_EXPERTS] = data[ROUTED_EXPERTS].contiguous()
    if shared:
        data[ROUTED_EXPERTS][0, :8] = -1  # another row of the group has them
        data[SHARED_PREFIXES] = column_of(BatchRows.of(data).prefixes(), range(4))
    inputs = build_training_inputs(data, InputLayout(packed, round_to=8), CPU)
    ids, experts = inputs.model_inputs["input_ids"], inputs.routed_experts
    assert experts is not None and experts.shape == (*ids.shape, 3, 2) and experts.dtype == torch.int8
    reported = is_reported(experts)
    assert torch.equal(experts[reported], ids[reported][:, None, None].expand(-1, 3, 2).to(torch.int8))
    expected = inputs.real_tokens.sum() - (8 if shared and not packed else 0)
    assert reported.sum() == expected and not bool((reported & ~inputs.real_tokens).any())


def test_the_integer_type_follows_the_number_of_experts() -> None:
    kinds = {number: experts_dtype(number).name for number in (8, 128, 129, 32768, 32769)}
    assert kinds == {8: "int8", 128: "int8", 129: "int16", 32768: "int16", 32769: "int32"}
    whole = with_unreported(np.full((3, 1, 2), 127, np.uint8), 5, 128)
    assert whole[:, 0, 0].tolist() == [127, 127, 127, -1, -1] and whole.dtype == np.int8
