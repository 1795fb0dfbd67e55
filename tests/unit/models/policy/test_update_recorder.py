"""Recorded updates: they are those that are made, on one rank and on several, and recording changes none of them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from policy_helpers import WeightedNLL, policy_config, random_batch, run_ranks, save_tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyRank, PolicyWorker
from nemo_rl.models.policy.workers.update_recorder import ROW_NUMBERS, RankUpdate, UpdateRecorder
from nemo_rl.models.training.tensor_checks import BlockFingerprints, fingerprint, fingerprints_here, joined

ROWS = 6


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _updates(rank: int, world_size: int, name: str, values: dict[str, Any], *, records: bool) -> dict[str, Any]:
    """Make two updates; return what was recorded, and the whole tensors."""
    config = policy_config(name, **values)
    worker = PolicyWorker(DTensorBackend(config, torch.device("cpu")), config)
    out: dict[str, Any] = {"weights": [], "gradients": [], "results": []}
    if records:
        worker.recorder = UpdateRecorder(worker.backend, of_modules=True)
    step, divided = worker.backend.clip_and_step, config.dtensor_cfg.tensor_parallel_size

    def step_and_keep() -> tuple[float, bool]:
        out["gradients"].append({name: _whole(each) for name, each in worker.backend.gradients_here().items()})
        return step()

    worker.backend.clip_and_step = step_and_keep  # type: ignore[method-assign]
    for seed in (1, 2):
        batch: BatchedDataDict[Any] = random_batch(rows=ROWS, seed=seed)
        batch[ROW_NUMBERS] = torch.arange(ROWS)
        out["weights"].append({name: _whole(each) for name, each in worker.backend.weights_here().items()})
        shards = shard_batch(batch, world_size // divided, training_strategy(config))
        shard = rank // divided
        made = worker.train(shards.data[shard], shards.sizes[shard], WeightedNLL(), count_valid(batch))
        out["results"].append((made.loss, made.grad_norm, made.metrics))
    out["weights"].append({name: _whole(each) for name, each in worker.backend.weights_here().items()})
    out["updates"] = worker.recorder.take() if worker.recorder else []
    out["scores"] = worker.get_logprobs(random_batch(rows=2), [2])
    return out


def _recorded(rank: int, world_size: int, name: str, values: dict[str, Any]) -> dict[str, Any]:
    return _updates(rank, world_size, name, values, records=True)


def _unrecorded(rank: int, world_size: int, name: str, values: dict[str, Any]) -> dict[str, Any]:
    return _updates(rank, world_size, name, values, records=False)


PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 50, "logprob_mb_tokens": 64}}
LAYOUTS = [(1, {}), (2, {}), (2, PACKED), (2, {"dtensor_cfg": {"tensor_parallel_size": 2}})]


@pytest.mark.parametrize(("world_size", "values"), LAYOUTS)
def test_fingerprints_are_those_of_whole_tensors(world_size: int, values: dict[str, Any], tmp_path: Path) -> None:
    name = save_tiny_model(tmp_path / "m", "qwen2", vocab_size=98)
    ranks = run_ranks(_recorded, world_size, name, values)
    for number in (0, 1):
        of_ranks: list[RankUpdate] = [rank["updates"][number] for rank in ranks]
        for recorded, whole in (
            ("before", ranks[0]["weights"][number]),
            ("gradients", ranks[0]["gradients"][number]),
            ("after", ranks[0]["weights"][number + 1]),
        ):
            found = joined(getattr(update, recorded) for update in of_ranks)
            assert found.keys() == whole.keys()
            for key, tensor in whole.items():
                assert found[key].checksum == fingerprint(tensor).checksum, (recorded, key)


@pytest.mark.parametrize(("world_size", "values"), LAYOUTS[:3])
def test_recording_changes_no_bit(world_size: int, values: dict[str, Any], tmp_path: Path) -> None:
    name = save_tiny_model(tmp_path / "m", "qwen2", vocab_size=98)
    with_records = run_ranks(_recorded, world_size, name, values)
    without = run_ranks(_unrecorded, world_size, name, values)
    for one, other in zip(with_records, without, strict=True):
        assert one["results"] == other["results"]
        assert torch.equal(one["scores"], other["scores"])
        assert all(torch.equal(one["weights"][2][key], other["weights"][2][key]) for key in one["weights"][2])


def test_losses_metrics_and_scores_are_those_of_the_rows(tmp_path: Path) -> None:
    name = save_tiny_model(tmp_path / "m", "qwen2", vocab_size=98)
    (one,) = run_ranks(_recorded, 1, name, {})
    two = run_ranks(_recorded, 2, name, {"train_micro_batch_size": 1})
    update: RankUpdate = one["updates"][0]
    assert len(update.losses) == 3 and sum(update.losses) == one["results"][0][0]
    assert sum(metrics["nll"] for metrics in update.metrics) == pytest.approx(one["results"][0][2]["nll"])
    assert update.grad_norm == one["results"][0][1]

    def scores_of(ranks: list[dict[str, Any]]) -> dict[int, torch.Tensor]:
        blocks = [block for rank in ranks for block in rank["updates"][0].logprobs]
        return {row: each for rows, block in blocks for row, each in zip(rows, block, strict=True)}

    alone, divided = scores_of([one]), scores_of(two)
    assert sorted(alone) == sorted(divided) == list(range(ROWS))
    for row in range(ROWS):
        torch.testing.assert_close(alone[row], divided[row], rtol=0, atol=1e-4)
    counted = random_batch(rows=ROWS, seed=1)
    assert bool((alone[0] != 0).any()) and bool((alone[1] == 0).all()), counted["sample_mask"]


def test_modules_are_recorded_in_the_order_in_which_their_calls_end(tmp_path: Path) -> None:
    name = save_tiny_model(tmp_path / "m", "qwen2", vocab_size=98)
    (one,) = run_ranks(_recorded, 1, name, {"train_micro_batch_size": 6})
    names = [module for module, _ in one["updates"][0].modules]
    assert names[0] == "model.embed_tokens"
    inner, outer = names.index("model.layers.0.mlp.down_proj"), names.index("model.layers.0.mlp")
    assert inner < outer < names.index("model.layers.0") < names.index("model.layers.1") < names.index("model.norm")
    first, second = (one["updates"][number].modules for number in (0, 1))
    assert [module for module, _ in second] == names, "hooks of the first update are gone in the second"
    assert first != second


def _without_scores(rank: int, world_size: int, name: str) -> RankUpdate:
    config = policy_config(name)
    worker = PolicyWorker(DTensorBackend(config, torch.device("cpu")), config)
    worker.recorder = UpdateRecorder(worker.backend, of_modules=False, gives_scores=False)
    batch = random_batch(rows=2)
    batch[ROW_NUMBERS] = torch.arange(2)
    worker.train(batch, [2], WeightedNLL(), count_valid(batch))
    (update,) = worker.recorder.take()
    return update


def test_a_rank_that_gives_no_scores_sends_only_what_it_has_of_the_model(tmp_path: Path) -> None:
    name = save_tiny_model(tmp_path / "m", "qwen2", vocab_size=98)
    (update,) = run_ranks(_without_scores, 1, name)
    assert (update.losses, update.metrics, update.logprobs) == ([], [], [])
    assert update.before and update.gradients and update.after and update.grad_norm


def _hooks_after_a_failure(rank: int, world_size: int, name: str) -> int:
    config = policy_config(name)
    backend = DTensorBackend(config, torch.device("cpu"))
    worker = PolicyWorker(backend, config)
    worker.recorder = UpdateRecorder(backend, of_modules=True)

    def out_of_memory(*arguments: Any, **keywords: Any) -> None:
        assert any(module._forward_hooks for module in backend.model.modules())
        raise MemoryError

    backend.run = out_of_memory  # type: ignore[method-assign]
    batch = random_batch(rows=2)
    with pytest.raises(MemoryError):
        worker.train(batch, [2], WeightedNLL(), count_valid(batch))
    return sum(len(module._forward_hooks) for module in backend.model.modules())


def test_a_pass_that_fails_leaves_no_hooks(tmp_path: Path) -> None:
    name = save_tiny_model(tmp_path / "m", "qwen2", vocab_size=98)
    assert run_ranks(_hooks_after_a_failure, 1, name) == [0]


def _pieces_of_one_row(rank: int, world_size: int) -> BlockFingerprints:
    mesh = init_device_mesh("cpu", (world_size,))
    return fingerprints_here({"w": distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)])})


def test_a_rank_without_rows_of_a_sharded_tensor_has_no_piece() -> None:
    first, second = run_ranks(_pieces_of_one_row, 2)
    assert first["w"][1] == fingerprint(torch.ones(1, 3)) and second == {}


class Rank(PolicyRank):
    """A rank without a process group and a model, whose recorder remembers that it was stopped."""

    def __init__(self) -> None:
        self.recorder = None


def test_taking_updates_ends_the_recording_and_without_one_there_are_none() -> None:
    rank, update = Rank(), RankUpdate(losses=[1.0])
    assert rank.take_updates() == []
    recorder = SimpleNamespace(stop_watching=mock.Mock(), take=lambda: [update])
    rank.recorder = recorder  # type: ignore[assignment]
    assert rank.take_updates() == [update]
    recorder.stop_watching.assert_called_once_with()
    assert rank.recorder is None
