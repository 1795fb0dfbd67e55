"""Copies of batches to a GPU and of scores back do not block the host in between.

Shown with tensors that have a device and no memory; how long it takes is for `tools/gpu_check.py` to say.
"""

from dataclasses import replace

import pytest
import torch
from policy_helpers import policy_config, random_batch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl.distributed.parallel_logprobs import TopK
from nemo_rl.models.attention.plan import AttentionPlan, Piece
from nemo_rl.models.dtensor.context_parallel import ContextParallel
from nemo_rl.models.megatron import inputs as megatron_inputs
from nemo_rl.models.policy.workers import scoring
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.models.training import inputs
from nemo_rl.models.training.inputs import (
    InputLayout,
    ModelInputs,
    build_distillation_inputs,
    build_score_inputs,
    build_topk_inputs,
    build_training_inputs,
)

META = torch.device("meta")


class Copies(TorchDispatchMode):
    """Records whether each copy to another device is asynchronous."""

    def __init__(self):
        super().__init__()
        self.asynchronous: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == META:
            self.asynchronous.append(bool(kwargs.get("non_blocking")))
        return func(*args, **kwargs)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["training", "distillation", "score", "topk", "rows"])
def test_every_tensor_of_a_batch_is_pinned_and_sent_asynchronously(kind, packed, monkeypatch) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    data = random_batch(rows=4)
    data["teacher_topk_indices"] = torch.zeros(*data["input_ids"].shape, 3, dtype=torch.long)
    num_tensors = len(data)
    layout = InputLayout(packed)
    builders = {
        "training": lambda: build_training_inputs(data, layout, META),
        "distillation": lambda: build_distillation_inputs(data, layout, META),
        "score": lambda: build_score_inputs(data, layout, META),
        "topk": lambda: build_topk_inputs(data, TopK(3), layout, META),
        "rows": lambda: data.slice(0, 2).to(META),
    }
    with Copies() as copies:
        builders[kind]()
    assert len(pinned) >= (num_tensors if kind == "rows" else 4)
    assert copies.asynchronous == [True] * len(pinned)


def test_bounds_of_pieces_are_sent_once_and_asynchronously(monkeypatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    plan = AttentionPlan([Piece(0, 4, 0, 4), Piece(4, 7, 0, 7)])
    with Copies() as copies:
        first = plan.bounds(2, META)
        assert plan.bounds(2, META) is first
    assert copies.asynchronous == [True, True]
    assert plan.bounds(1, torch.device("cpu")).keys.tolist() == [0, 4, 11]


def test_scores_cause_one_synchronization(monkeypatch) -> None:
    events: list[str] = []

    class Backend:
        device = torch.device("cuda")
        shares_prompts = False

        def run(self, microbatches, forward_step, *, backward):
            for index, microbatch in enumerate(microbatches):
                forward_step(index, torch.zeros(len(microbatch.positions_K)), torch.zeros(0))

    monkeypatch.setattr(inputs, "to_device", lambda tensor, device: tensor)
    monkeypatch.setattr(scoring, "to_host", lambda tensor: events.append("fetch") or tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("synchronize"))
    worker = PolicyWorker(Backend(), policy_config("m"))
    worker.get_logprobs(random_batch(rows=6), [2, 2, 2])
    assert events == ["fetch"] * 3 + ["synchronize"]


def without_values(monkeypatch, given: ModelInputs) -> tuple[ModelInputs, list[int]]:
    """Put inputs on a device whose values only `cpu` and `tolist` read, as those of a GPU; return the reads too."""
    values: dict[int, torch.Tensor] = {}
    kept, reads = [], list[int]()

    def sent(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.to(META))
        values[id(kept[-1])] = tensor
        return kept[-1]

    def read(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            reads.append(tensor.numel())
            return values[id(tensor)]
        return tensor

    to_list = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "cpu", read)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: to_list(read(self)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    model_inputs = {
        key: sent(value) if isinstance(value, torch.Tensor) else value for key, value in given.model_inputs.items()
    }
    tensors = {name: sent(getattr(given, name)) for name in ("positions_K", "targets_K", "real_tokens")}
    return replace(given, model_inputs=model_inputs, **tensors), reads


@pytest.mark.parametrize("packed", [False, True])
def test_ranks_of_megatron_read_a_microbatch_from_the_device_twice(monkeypatch, packed: bool) -> None:
    """Every other step that depends on values would wait for the GPU; on this device it raises an error."""
    rows = random_batch(rows=3, width=24)
    given = build_training_inputs(rows, InputLayout(packed, round_to=8), torch.device("cpu"))
    monkeypatch.setattr(megatron_inputs, "_packed_parameters", lambda bounds, device: list(bounds))
    division = megatron_inputs.TokenDivision(cp=2, cp_rank=1)
    expected = megatron_inputs.rank_inputs(given, division, num_further=1)
    on_device, reads = without_values(monkeypatch, given)
    own = megatron_inputs.rank_inputs(on_device, division, num_further=1)
    assert len(reads) == 1 + packed
    for name in ("positions_k", "targets_k", "places_k", "real_tokens"):
        found = getattr(own, name)
        assert (found.is_meta, found.shape) == (True, getattr(expected, name).shape), name
    assert own.arguments["input_ids"].shape == expected.arguments["input_ids"].shape


@pytest.mark.parametrize("packed", [False, True])
def test_context_parallel_ranks_read_a_microbatch_from_the_device_twice(monkeypatch, packed: bool) -> None:
    given = build_training_inputs(random_batch(rows=3), InputLayout(packed, 8), torch.device("cpu"))
    ranks = object.__new__(ContextParallel)
    ranks._group, ranks._ranks, ranks._rank, ranks._row = None, 2, 1, lambda chunks, group: chunks
    expected = ranks.divide(given)
    on_device, reads = without_values(monkeypatch, given)
    own = ranks.divide(on_device)
    assert len(reads) == 1 + packed
    assert (own.places.is_meta, own.places.shape) == (True, expected.places.shape)
    assert own.inputs.targets_K.shape == expected.inputs.targets_K.shape
