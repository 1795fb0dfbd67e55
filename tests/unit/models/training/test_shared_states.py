"""Recurrent layers begin a part of a row with the state after the part before it, which changes only rounding."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from recurrent_models import RECURRENT, recurrent_model
from torch import Tensor
from transformers import PreTrainedModel

from nemo_rl.data.common_prefixes import Prefixes
from nemo_rl.models.attention.registered import register_varlen_attention
from nemo_rl.models.dtensor.attention import set_attention, verify_shared_prompts
from nemo_rl.models.huggingface import recurrent, shared_states
from nemo_rl.models.huggingface.probe_model import small_probe_model
from nemo_rl.models.huggingface.recurrent import respect_borders
from nemo_rl.models.huggingface.shared_states import PrefixTree, of_similar_lengths, scan
from nemo_rl.models.training.shared_prefixes import SharedLayout, share_prefixes
from nemo_rl.utils.errors import ConfigError

MAMBA_1 = ("falcon_mamba", "jamba", "mamba", "zamba")
ROWS = (90, 75, 2, 71, 30, 90)
SHARED = (0, 66, 1, 1, 1, 29)
"""Tokens that each row shares with the one before it: more than a chunk, fewer than a convolution reads, and a tree."""


@pytest.fixture(autouse=True)
def no_row_is_left() -> Iterator[None]:
    """Forget the last row, because models of other tests may compute without hooks."""
    yield
    recurrent._borders.enter({})


def rows_of() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 96, (length,), generator=generator) for length in ROWS]
    for number, equal in enumerate(SHARED):
        rows[number][:equal] = rows[number - 1][:equal]
    return rows


def layout_of(rows: Sequence[Tensor], round_to: int = 1) -> SharedLayout:
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    return share_prefixes(ids, ROWS, Prefixes(list(range(len(ROWS))), list(SHARED)), round_to)


def sharing(model: PreTrainedModel) -> PreTrainedModel:
    set_attention(model, register_varlen_attention())
    respect_borders(model)
    return model


def gradients(model: PreTrainedModel, logits_N: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a weighted sum of the logits of all tokens of all rows."""
    weights = torch.randn(logits_N.shape, generator=torch.Generator().manual_seed(2), dtype=logits_N.dtype)
    model.zero_grad()
    (logits_N * weights).sum().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("model_type", [name for name in RECURRENT if name not in MAMBA_1])
def test_rows_that_share_tokens_equal_rows_alone(model_type: str) -> None:
    rows, alone = rows_of(), recurrent_model(model_type)
    exact = torch.cat([alone(input_ids=row[None], use_cache=False).logits[0] for row in rows])
    expected = gradients(alone, exact)
    model, layout = sharing(recurrent_model(model_type)), layout_of(rows, round_to=16)
    row_N = torch.arange(len(ROWS)).repeat_interleave(torch.tensor(ROWS))
    column_N = torch.cat([torch.arange(length) for length in ROWS])
    found = model(**layout.model_inputs, use_cache=False).logits[0][layout.places(row_N, column_N)]
    assert layout.num_tokens < sum(ROWS) - 80
    assert (found - exact).abs().max() <= 5e-6 * exact.abs().max()
    given = gradients(model, found)
    least = 1e-3 * max(each.abs().max() for each in expected.values())
    for name, each in expected.items():
        assert (given[name] - each).abs().max() <= 2e-4 * max(each.abs().max(), least), name


@pytest.mark.parametrize("model_type", ["qwen3_next", "nemotron_h", "lfm2", "kimi_linear"])
def test_the_check_before_a_run_notices_a_lost_state(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharing(small_probe_model(recurrent_model(model_type)))
    verify_shared_prompts(model)
    with monkeypatch.context() as planted:
        planted.setattr(PrefixTree, "_before", lambda self, part, count: [self.num_tokens] * count)
        with pytest.raises(ConfigError, match="outputs for shared sequences differ"):
            verify_shared_prompts(model)
    if model_type == "lfm2":  # it has convolutions only
        return

    def forgetful(*arguments: Any) -> Any:
        *others, tree = arguments
        return scan(*others, PrefixTree(tree._lengths, [None] * len(tree.parents)))

    monkeypatch.setattr(shared_states, "scan", forgetful)
    with pytest.raises(ConfigError, match="outputs for shared sequences differ"):
        verify_shared_prompts(model)


def test_a_function_without_states_is_named() -> None:
    with pytest.raises(ConfigError, match="mamba_selective_scan takes no state to begin with"):
        verify_shared_prompts(sharing(recurrent_model("mamba")))


def test_parts_follow_their_parents_and_only_the_last_parts_are_padded() -> None:
    tree = PrefixTree([4, 3, 2, 200, 3, 5], [None, 0, 1, 0, 0, None])
    batches = tree.by_depth(torch.device("cpu")).batches
    assert [batch.parts for batch in batches] == [(0,), (5,), (1,), (3,), (4,), (2,)]
    assert tree.after_tokens(4, torch.device("cpu")).batches[1].tokens[-1].tolist() == [3, 4, 5, 6, 7, 8, 217, 217, 217]


def test_sequences_of_similar_lengths_are_padded_together() -> None:
    assert of_similar_lengths([10, 1000, 800, 70, 700]) == [[1, 2], [4], [3, 0]]


def test_layers_that_are_computed_again_begin_with_the_same_states() -> None:
    rows: Any = rows_of()
    model, inputs = sharing(recurrent_model("qwen3_next")), layout_of(rows).model_inputs
    exact = gradients(model, model(**inputs, use_cache=False).logits[0])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    output = model(**inputs, use_cache=False).logits[0]
    model(input_ids=rows[0][None], use_cache=False)
    for name, each in gradients(model, output).items():
        torch.testing.assert_close(each, exact[name], rtol=0, atol=1e-5 * float(exact[name].abs().max()))
