"""States are restored bit for bit on other numbers of ranks, and if ranks hold other parameters."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from policy_helpers import policy_config, process_group, run_ranks, save_tiny_model, tiny_model
from safetensors.torch import load_file
from test_policy_checkpoint import _save, _worker
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from trained_states import assert_equal_states, update, whole_state
from transformers import PreTrainedModel

from nemo_rl.distributed.ranks.tensor_block import TensorBlock, whole_block
from nemo_rl.models.dtensor.checkpoints import model_files as checkpoint_io
from nemo_rl.models.dtensor.checkpoints.model_files import (
    BlockToWrite,
    join_pieces,
    parts_of_this_rank,
    prepare_weights,
    write_parts,
)
from nemo_rl.models.dtensor.checkpoints.training_state import load_training_state, prepare_training_state
from nemo_rl.models.dtensor.optimizer import build_optimizer, build_scheduler, optimizer_settings
from nemo_rl.models.training.interfaces import CheckpointPaths
from nemo_rl.utils.errors import CheckpointError


def _load(rank: int, world_size: int, name: str, step: str) -> dict:
    worker, _ = _worker(name)
    worker.load_checkpoint(f"{step}/weights", f"{step}/optimizer")
    return whole_state(worker)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_a_resharded_state_equals_the_saved_one(before, after, tmp_path) -> None:
    name, step = save_tiny_model(tmp_path / "m", tie=True), str(tmp_path / "step")
    saved, _ = run_ranks(_save, before, name, step)[0]
    assert any(key.startswith("optim.exp_avg_sq") for key in saved)
    for loaded in run_ranks(_load, after, name, step):
        assert_equal_states(saved, loaded)


def test_checkpoints_with_hyperparameters_next_to_the_states_still_load(tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m")
    paths = CheckpointPaths(tmp_path / "w", tmp_path / "o")
    with process_group():
        worker, config = _worker(name)
        update(worker, config, 1)
        worker.backend.save(paths)
        state = get_optimizer_state_dict(worker.backend.model.hf, worker.backend.optimizer)
        dcp.save({"optim": state}, checkpoint_id=str(tmp_path / "o/optim"))
        trainer = torch.load(tmp_path / "o/trainer.pt")
        assert trainer.pop("optimizer_groups")[0]["weight_decay"] == 0.01
        torch.save(trainer, tmp_path / "o/trainer.pt")
        again, _ = _worker(name)
        again.backend.load(paths)
        assert_equal_states(whole_state(worker), whole_state(again))


CONFIG = policy_config("m")


def _stage(stage: int | None) -> PreTrainedModel:
    """Make one of two layers and what comes before or after it, by the names of the whole model; None makes all."""
    hf = tiny_model("llama")
    if stage is not None:
        hf.model.layers = nn.ModuleDict({str(stage): hf.model.layers[stage]})
        if stage == 0:
            hf.lm_head, hf.model.norm = nn.Identity(), nn.Identity()
        else:
            hf.model.embed_tokens = nn.Identity()
    return hf


def _optimizer(hf: PreTrainedModel):
    optimizer = build_optimizer(hf.parameters(), CONFIG.optimizer)
    return optimizer, build_scheduler(optimizer, None), optimizer_settings(CONFIG)


def _moments(hf: PreTrainedModel, optimizer) -> dict[str, torch.Tensor]:
    named = hf.named_parameters()
    return {f"{name}.{key}": value for name, p in named for key, value in optimizer.state[p].items()}


def _save_stage(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    hf = _stage(rank)
    optimizer, scheduler, settings = _optimizer(hf)
    for parameter in hf.parameters():
        parameter.grad = torch.sin(parameter.detach() * 10)
    optimizer.step()
    prepare_weights(hf, Path(folder))(None)
    prepare_training_state(hf, optimizer, scheduler, settings, Path(folder) / "o")(None)
    return {**dict(hf.named_parameters()), **_moments(hf, optimizer)}


def _load_stage(rank: int, world_size: int, folder: str, stage: int | None) -> dict[str, torch.Tensor]:
    hf = _stage(stage)
    optimizer, scheduler, settings = _optimizer(hf)
    load_training_state(hf, optimizer, scheduler, settings, Path(folder) / "o")
    return _moments(hf, optimizer)


def test_ranks_may_hold_different_parameters(tmp_path) -> None:
    first, last = run_ranks(_save_stage, 2, str(tmp_path))
    saved = first | last
    files = load_file(tmp_path / "model/model-00001-of-00001.safetensors")
    assert files.keys() == dict(tiny_model("llama").named_parameters()).keys()
    assert all(torch.equal(files[name], saved[name]) for name in files)
    moments = {name: value for name, value in saved.items() if name not in files}
    with process_group():
        assert_equal_states(_load_stage(0, 1, str(tmp_path), None), moments)
        mine = _load_stage(0, 1, str(tmp_path), 1)
    assert_equal_states(mine, {name: last[name] for name in mine})


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_each_element_is_written_by_one_rank(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies of two shards, of which the second may be empty, and whole tensors next to them."""
    written = {"sharded": torch.zeros(rows, 2), "whole": torch.zeros(2), "other": torch.zeros(3)}
    monkeypatch.setattr(dist, "all_gather_object", lambda found, mine: found.__setitem__(slice(None), [mine] * 4))
    for rank in range(4):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
            sharded = distribute_tensor(torch.ones(rows, 2), mesh, [Replicate(), Shard(0)], src_data_rank=None)
            weights = {"sharded": sharded, "whole": torch.ones(2), "other": torch.ones(3)}
            for part in parts_of_this_rank(weights.items(), weights):
                assert part.values.shape == part.block.shape and part.values.numel() > 0
                part.block.of(written[part.name]).add_(part.values)
        finally:
            dist.destroy_process_group()
    assert all(torch.equal(counts, torch.ones_like(counts)) for counts in written.values())


def test_missing_or_short_pieces_are_noticed(tmp_path) -> None:
    values = torch.arange(12.0).reshape(3, 4)
    part = BlockToWrite("w", (4, 4), TensorBlock((0, 0), (3, 4)), values)
    pieces = write_parts(tmp_path / "rank", [part])
    with pytest.raises(RuntimeError, match="12 of 16 elements of w"):
        join_pieces(tmp_path / "out", {"w": pieces})
    (tmp_path / "rank").write_bytes(b"short")
    with pytest.raises(OSError, match="rank ends before"):
        join_pieces(tmp_path / "out", {"w": pieces})


def test_pieces_of_any_shape_and_dtype_are_joined(tmp_path) -> None:
    whole = {
        "columns": torch.randn(3, 8),
        "bits": torch.randint(0, 2, (5,)).bool(),
        "brain": torch.randn(2, 2).to(torch.bfloat16),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
    }
    blocks = {name: [whole_block(tensor.shape)] for name, tensor in whole.items()}
    blocks["columns"] = [TensorBlock((0, first), (3, 4)) for first in (0, 4)]
    parts = [
        BlockToWrite(name, tuple(whole[name].shape), block, block.of(whole[name]))
        for name, of_tensor in blocks.items()
        for block in of_tensor
    ]
    pieces: dict = {}
    for piece in write_parts(tmp_path / "rank", parts):
        pieces.setdefault(piece.name, []).append(piece)
    join_pieces(tmp_path / "out.safetensors", pieces)
    assert_equal_states(load_file(tmp_path / "out.safetensors"), whole)


def _fails_halfway(rank: int, world_size: int, name: str, folder: str) -> str:
    """Make the last rank fail to write its pieces; every rank raises, and none waits for another."""
    worker, _ = _worker(name)
    if rank == world_size - 1:
        checkpoint_io.write_parts = lambda file, parts: write_parts(Path("/proc/nowhere/file"), parts)
    dist.barrier()
    with pytest.raises(CheckpointError) as failure:
        worker.backend.save(CheckpointPaths(Path(folder)))
    return str(failure.value)


def test_a_rank_that_cannot_write_makes_all_ranks_fail(tmp_path) -> None:
    said = run_ranks(_fails_halfway, 2, save_tiny_model(tmp_path / "m"), str(tmp_path / "w"))
    assert said[0] == said[1] and "nowhere" in said[0]
