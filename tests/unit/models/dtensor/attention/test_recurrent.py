"""Recurrent layers keep their states within each packed sequence, also if other ranks have some of its tokens."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_helpers import VOCAB, WeightedNLL, policy_config, random_batch, run_ranks
from recurrent_models import RECURRENT, WITHOUT_CORES, recurrent_model
from torch import Tensor
from transformers import PreTrainedModel

from nemo_rl.distributed.ranks.placements import whole
from nemo_rl.models.attention.registered import register_varlen_attention
from nemo_rl.models.dtensor.attention import set_attention, use_registered_attention, verify_division, verify_packing
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.huggingface.probe_model import small_probe_model
from nemo_rl.models.huggingface.recurrent import CORES, SequenceGroups, respect_borders
from nemo_rl.models.policy.batching import count_valid, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.models.training.inputs import packed_model_inputs
from nemo_rl.utils.errors import ConfigError

LENGTHS = (37, 1, 70, 21)


def segments_of(lengths: Sequence[int] = LENGTHS, seed: int = 1) -> list[Tensor]:
    ids = torch.randint(3, 96, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return list(ids.split(list(lengths)))


def packing(model: PreTrainedModel) -> PreTrainedModel:
    set_attention(model, register_varlen_attention())
    respect_borders(model)
    return model


def outputs_and_gradients(model: PreTrainedModel, rows: Sequence[dict[str, Any]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits of all rows, `[N, V]`, and the gradients of a weighted sum of them."""
    model.zero_grad()
    logits = torch.cat([model(**row, use_cache=False).logits[0] for row in rows])
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=logits.dtype)
    (logits * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest difference of a gradient, relative to its largest entry or a thousandth of all."""
    assert ours.keys() == theirs.keys()
    least = 1e-3 * max(each.abs().max().item() for each in theirs.values())
    return max(
        (ours[name] - each).abs().max().item() / max(each.abs().max().item(), least) for name, each in theirs.items()
    )


@pytest.mark.parametrize("model_type", RECURRENT)
def test_packed_rows_equal_rows_alone(model_type: str) -> None:
    """The rows alone are computed by transformers' own functions and attention, without the wrapped ones."""
    segments = segments_of()
    alone, exact = outputs_and_gradients(recurrent_model(model_type), [{"input_ids": each[None]} for each in segments])
    packed, gradients = outputs_and_gradients(packing(recurrent_model(model_type)), [packed_model_inputs(segments)])
    assert (packed - alone).abs().max() <= 2e-6 * alone.abs().max()
    assert largest_difference(gradients, exact) < 2e-4  # float32: 7e-5 on one processor, where a leak gives 1e-2


def test_other_models_of_the_process_do_not_get_the_borders() -> None:
    """The wrapped functions are in the file of the model's class, so a second model calls them too."""
    segments = segments_of()
    row = {"input_ids": torch.cat(segments)[None]}
    exact, gradients = outputs_and_gradients(recurrent_model("nemotron_h"), [row])
    outputs_and_gradients(packing(recurrent_model("nemotron_h")), [packed_model_inputs(segments)])
    again, gradients_again = outputs_and_gradients(recurrent_model("nemotron_h"), [row])
    assert torch.equal(again, exact)
    assert all(torch.equal(gradients_again[name], each) for name, each in gradients.items())


@pytest.mark.parametrize("model_type", RECURRENT)
def test_the_check_before_a_run_accepts_packed_and_divided_rows(model_type: str) -> None:
    use_registered_attention(small_probe_model(recurrent_model(model_type)), packed=True, divided=True)


@pytest.mark.parametrize("model_type", WITHOUT_CORES)
def test_other_recurrent_layers_are_refused(model_type: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)ForCausalLM.*(packed sequences|its own code)"):
        use_registered_attention(recurrent_model(model_type), packed=True, divided=False)


@pytest.mark.parametrize("model_type", ["nemotron_h", "qwen3_next", "mamba", "kimi_linear", "lfm2"])
def test_each_function_that_ignores_borders_is_noticed(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = packing(recurrent_model(model_type))
    verify_packing(model)
    verify_division(model)
    file = sys.modules[type(model).__module__]
    names = [name for name in CORES if hasattr(file, name) and name not in _FUSED]
    assert names
    for name in names:
        with monkeypatch.context() as planted:
            planted.setattr(file, name, getattr(file, name).__wrapped__)
            with pytest.raises(ConfigError, match="mixes packed sequences"):
                verify_packing(model)
            with pytest.raises(ConfigError, match="mixes divided sequences"):
                verify_division(model)


_FUSED = ("mamba_inner_fn", "mamba2_split_conv1d_scan_combined")
"""Functions that do nothing without their CUDA package."""


def test_recomputed_layers_get_their_own_borders() -> None:
    """Layers that are computed again in the backward pass of a pipeline follow the forward passes of other rows."""
    lengths = ((20, 13, 31), (5, 50, 9))
    rows = [packed_model_inputs(segments_of(each, seed)) for seed, each in enumerate(lengths)]
    model = packing(recurrent_model("qwen3_next"))
    _, exact = outputs_and_gradients(model, rows)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    _, found = outputs_and_gradients(model, rows)
    assert largest_difference(found, exact) < 1e-6


def test_a_padded_row_after_a_packed_one_has_no_borders() -> None:
    model = packing(recurrent_model("mamba2"))
    ids = segments_of((24,))[0][None]
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        model(**packed_model_inputs(segments_of((11, 13))), use_cache=False)
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


def test_sequences_of_similar_lengths_are_one_batch() -> None:
    bounds = torch.tensor([0, 10, 11, 500, 560, 1560])
    groups = SequenceGroups.of(bounds)
    assert groups is not None
    assert [list(each.shape) for each in groups.tokens] == [[1, 1000], [1, 489], [3, 60]]
    row = torch.randn(1, 7, 1560)
    batches = list(groups.batches(row, -1))
    assert torch.equal(groups.row(batches, -1), row)
    assert batches[2].shape == (3, 7, 60)
    assert batches[2][2, :, 1:].abs().sum() == 0
    assert SequenceGroups.of(torch.tensor([0, 9])) is None


def gradients_of_an_update(rank: int, world_size: int, folder: str, values: dict[str, Any]) -> dict[str, Tensor]:
    batch = random_batch(8, 40, seed=3)
    config = policy_config(folder, train_global_batch_size=8, max_total_sequence_length=40, **values)
    backend = DTensorBackend(config, torch.device("cpu"), init_reference_model=False)
    worker = PolicyWorker(backend, config)
    shards = shard_batch(batch, world_size, training_strategy(config))
    gradients: dict[str, Tensor] = {}
    step = backend.clip_and_step

    def watched() -> Any:
        named = backend.model.hf.named_parameters()
        gradients.update({name: whole(each.grad).clone() for name, each in named if each.grad is not None})
        return step()

    backend.clip_and_step = watched
    worker.train(shards.data[rank], shards.sizes[rank], WeightedNLL(), count_valid(batch))
    return gradients


@pytest.mark.parametrize("model_type", ["nemotron_h", "qwen3_next"])
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recomputed"])
def test_gradients_of_packed_rows_equal_those_of_padded_rows(tmp_path: Path, model_type: str, recompute: bool) -> None:
    recurrent_model(model_type, vocab_size=VOCAB).save_pretrained(tmp_path)
    section = {"dtensor_cfg": {"activation_checkpointing": recompute}}
    packed = {"sequence_packing": {"enabled": True, "train_mb_tokens": 160}} | section
    (padded,) = run_ranks(gradients_of_an_update, 1, str(tmp_path), section)
    for ranks in (1, 2):
        for found in run_ranks(gradients_of_an_update, ranks, str(tmp_path), packed):
            assert largest_difference(found, padded) < 1e-4
