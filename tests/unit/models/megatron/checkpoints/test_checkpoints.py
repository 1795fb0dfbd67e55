"""Checkpoints of Megatron Core: bit for bit on the same mesh, exact on others, errors by name, exports by streaming."""

import io
import json
import os
import pickle
import shutil
import signal
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import backend_cases
import mesh_parity
import pytest
import torch
import torch.distributed as dist
from checkpoint_models import Mesh, Run, differing, paths_in
from rank_backend import CPU
from rank_host import limit_waits, needs_megatron
from safetensors.torch import load_file
from small_models import hf_config, saved
from torch.distributed.checkpoint.filesystem import _StorageInfo
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from nemo_rl.models.megatron.checkpoints.folder import SavedTensors
from nemo_rl.models.megatron.training_backend import MegatronTraining
from nemo_rl.models.training.inputs import InputLayout, build_score_inputs
from nemo_rl.models.training.interfaces import CheckpointPaths
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.errors import CheckpointError

pytestmark = needs_megatron

BF16 = "bfloat16"
TP2, DP2, EP2 = Mesh(tp=2), Mesh(distributed=True), Mesh("qwen3_moe", ep=2)
MTP = Mesh("deepseek_v3", mtp=1)
REWARD = Mesh(tp=2, sp=True, scores=True)
HYBRID = Mesh("nemotron_h", tp=2, sp=True, num_layers=4)
DELTA = Mesh("qwen3_next", tp=2, sp=True)


def _resume(rank: int, num_ranks: int, mesh: Mesh, folder: Path) -> dict[str, Any]:
    """Run two updates, save, run two more; then run these two again from the checkpoint."""
    run = Run(mesh)
    for step in range(2):
        run.update(step)
    run.save(folder)
    saved = run.state()
    losses = [run.update(step) for step in (2, 3)]
    ended = run.state()
    torch.manual_seed(99 + rank)
    again = Run(mesh, seed=5)
    again.update(7)
    again.load(folder)
    loaded = differing(saved, again.state())
    resumed = [again.update(step) for step in (2, 3)]
    return {"losses": losses, "resumed": resumed, "loaded": loaded, "ended": differing(ended, again.state())}


@pytest.mark.parametrize(
    ("num_ranks", "mesh"),
    [
        pytest.param(2, TP2, id="tp2"),
        pytest.param(2, DP2, id="dp2-distributed", marks=pytest.mark.long),
        pytest.param(2, replace(DP2, precision=BF16), id="dp2-distributed-bf16"),
        pytest.param(2, Mesh("qwen2", pp=2, precision=BF16), id="pp2-tied-bf16"),
        pytest.param(2, EP2, id="ep2", marks=pytest.mark.long),
        pytest.param(2, replace(EP2, distributed=True), id="ep2-distributed"),
        pytest.param(1, Mesh(optimizer="sgd"), id="sgd"),
        pytest.param(2, replace(MTP, pp=2, distributed=True), id="mtp-pp2"),
        pytest.param(2, replace(HYBRID, distributed=True, precision=BF16), id="hybrid-tp2-distributed-bf16"),
        pytest.param(2, replace(DELTA, distributed=True, precision=BF16), id="delta-tp2-distributed-bf16"),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(host, tmp_path, num_ranks, mesh):
    for found in host.run(_resume, num_ranks, mesh, tmp_path):
        assert found["loaded"] == []
        assert found["ended"] == []
        assert found["resumed"] == found["losses"]


def _write(rank: int, num_ranks: int, mesh: Mesh, folder: Path) -> float:
    run = Run(mesh)
    for step in range(2):
        run.update(step)
    run.save(folder)
    torch.manual_seed(2)  # the next batch
    return run.update(2)


def _reshard(rank: int, num_ranks: int, mesh: Mesh, folder: Path, copy: Path) -> float:
    run = Run(mesh, seed=5)
    torch.manual_seed(55 + rank)
    own = torch.get_rng_state()
    run.load(folder)
    assert torch.equal(torch.get_rng_state(), own), "generators are of one rank of one mesh"
    run.save(copy)
    torch.manual_seed(2)
    return run.update(2)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((2, TP2), (1, Mesh()), id="tp2-1", marks=pytest.mark.long),
        pytest.param((2, TP2), (2, Mesh(pp=2)), id="tp2-pp2"),
        pytest.param((1, Mesh()), (2, Mesh(tp=2, sp=True)), id="1-tp2sp"),
        pytest.param((2, DP2), (1, Mesh(distributed=True)), id="dp2-dp1", marks=pytest.mark.long),
        pytest.param((2, replace(DP2, precision=BF16)), (1, Mesh(precision=BF16)), id="dp2distributed-plain-bf16"),
        pytest.param((1, Mesh()), (2, DP2), id="plain-dp2distributed", marks=pytest.mark.long),
        pytest.param((2, EP2), (2, Mesh("qwen3_moe", tp=2, sp=True, etp=2)), id="ep2-tp2ep1"),
        pytest.param(
            (2, replace(EP2, distributed=True)),
            (1, Mesh("qwen3_moe", distributed=True)),
            id="ep2-ep1",
            marks=pytest.mark.long,
        ),
        pytest.param((1, Mesh("qwen3_moe")), (2, EP2), id="ep1-ep2", marks=pytest.mark.long),
        pytest.param((2, Mesh("qwen2", pp=2)), (2, Mesh("qwen2", tp=2)), id="pp2-tp2-tied"),
        pytest.param((2, replace(MTP, pp=2)), (1, MTP), id="pp2-1-mtp"),
        pytest.param((2, HYBRID), (2, Mesh("nemotron_h", pp=2, num_layers=4)), id="tp2-pp2-hybrid"),
        pytest.param((2, DELTA), (2, Mesh("qwen3_next", pp=2)), id="tp2-pp2-delta"),
    ],
)
def test_another_mesh_reads_every_bit_and_continues_with_the_same_loss(host, tmp_path, before, after):
    expected = host.run(_write, *before, tmp_path / "written")[0]
    found = host.run(_reshard, *after, tmp_path / "written", tmp_path / "copy")[0]
    assert found == pytest.approx(expected, abs=5e-3 if after[1].precision == BF16 else 2e-6)
    for kind in ("weights/iter_0000000", "optimizer/optim"):
        assert_same_tensors(tmp_path / "written" / "policy" / kind, tmp_path / "copy" / "policy" / kind)
    trainers = [torch.load(tmp_path / name / "policy/optimizer/trainer.pt") for name in ("written", "copy")]
    assert trainers[0] == trainers[1]
    assert trainers[0]["step"] == 2


def assert_same_tensors(one: Path, other: Path) -> None:
    ours, theirs = SavedTensors(one), SavedTensors(other)
    assert sorted(ours.names) == sorted(theirs.names)
    assert [name for name in ours.names if not torch.equal(ours.read([name]), theirs.read([name]))] == []


def _shared_step(rank: int, num_ranks: int, folder: Path) -> list[int]:
    run = Run(DP2)
    run.update(0)
    run.save(folder)
    run = Run(DP2)
    run.load(folder)
    states = [state for each in run.optimizers() for state in each.state.values()]
    assert [float(state["step"]) for state in states] == [1.0] * len(states)
    return [len(states), len({state["step"].data_ptr() for state in states})]


def test_each_parameter_has_its_own_step_count_after_a_load(host, tmp_path):
    for num_parameters, num_tensors in host.run(_shared_step, 2, tmp_path):
        assert num_tensors == num_parameters > 1


def _before_updates(rank: int, num_ranks: int, folder: Path) -> list[str]:
    mesh = replace(DP2, precision=BF16)
    run = Run(mesh)
    run.save(folder)
    saved = run.state()
    run = Run(mesh, seed=5)
    run.update(0)
    run.load(folder)
    return differing(saved, run.state())


def test_a_checkpoint_from_before_the_first_update_loads(host, tmp_path):
    assert host.run(_before_updates, 2, tmp_path) == [[], []]


def _weights_alone(rank: int, num_ranks: int, folder: Path) -> tuple[bool, int]:
    mesh = replace(DP2, precision=BF16)
    run = Run(mesh)
    run.save(folder)
    expected = run.state()
    run = Run(mesh, seed=5)
    run.update(0)
    run.backend.load(CheckpointPaths(paths_in(folder).weights))
    masters = [name for name in differing(expected, run.state()) if name.endswith("main")]
    return masters == [], sum(len(state) for each in run.optimizers() for state in each.state.values())


def test_loading_only_weights_updates_the_float32_copies_of_the_optimizer(host, tmp_path):
    assert host.run(_weights_alone, 2, tmp_path) == [(True, 0), (True, 0)]


def _refuse(rank: int, num_ranks: int, folder: Path, format_name: str) -> str:
    from nemo_rl.models.megatron.checkpoints import torch_dist

    run = Run(Mesh())
    run.update(0)
    torch_dist.CONTENT = {**torch_dist.CONTENT, "distrib_optim_sharding_type": format_name}
    run.save(folder)
    torch_dist.CONTENT = {**torch_dist.CONTENT, "distrib_optim_sharding_type": torch_dist.OPTIMIZER_FORMAT}
    with pytest.raises(CheckpointError) as caught:
        run.load(folder)
    return str(caught.value)


@pytest.mark.parametrize("format_name", ["dp_reshardable", "fully_sharded_model_space"])
def test_broken_checkpoint_formats_are_refused_by_name(host, tmp_path, format_name):
    (message,) = host.run(_refuse, 1, tmp_path, format_name)
    assert f"format {format_name}:" in message
    assert "fully_reshardable" in message


def _staged(rank: int, num_ranks: int, mesh: Mesh, folder: Path) -> bool:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    run = Run(mesh)
    run.update(0)
    run.save(folder / "at_once")
    write = run.backend.stage_save(paths_in(folder / "staged"))
    thread = threading.Thread(target=write)
    run.update(1)
    thread.start()
    for step in (2, 3):
        run.update(step)
    thread.join()
    return filesystem_async._results_queue is None


@pytest.mark.parametrize("mesh", [pytest.param(TP2, id="plain"), pytest.param(DP2, id="distributed")])
def test_a_staged_checkpoint_ignores_later_updates(host, tmp_path, mesh):
    assert host.run(_staged, 2, mesh, tmp_path) == [True, True], "a process was spawned for the save"
    for kind in ("weights/iter_0000000", "optimizer/optim"):
        assert_same_tensors(tmp_path / "at_once" / "policy" / kind, tmp_path / "staged" / "policy" / kind)
    for name in ("trainer.pt", "rng/rank_00001.pt"):
        one, other = (tmp_path / at / "policy" / "optimizer" / name for at in ("at_once", "staged"))
        assert str(torch.load(one)) == str(torch.load(other))


def _full_disk(rank: int, num_ranks: int, folder: Path) -> tuple[str, list[str]]:
    from torch.distributed.checkpoint import FileSystemWriter

    run = Run(TP2)
    run.update(0)
    real = FileSystemWriter.write_data
    if rank == 1:
        FileSystemWriter.write_data = _no_space
    with pytest.raises(CheckpointError) as caught:
        run.save(folder / "full")
    FileSystemWriter.write_data = real
    run.update(1)
    saved = run.state()
    run.save(folder / "later")
    run.update(2)
    run.load(folder / "later")
    return str(caught.value), differing(saved, run.state())


def _no_space(self: Any, plan: Any, planner: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_full_disk_raises_on_all_ranks_and_training_continues(host, tmp_path):
    for message, changed in host.run(_full_disk, 2, tmp_path):
        assert str(tmp_path / "full") in message
        assert "No space left on device" in message
        assert changed == []


PLANTS = {
    "folder": (1, "pathlib.Path.mkdir"),
    "format": (0, "nemo_rl.models.megatron.checkpoints.torch_dist.save_config"),
    "configuration": (0, "transformers.PretrainedConfig.save_pretrained"),
    "generators": (1, "torch.save"),
    "trainer": (0, "torch.save"),
}
"""Each write of a checkpoint except that of tensors: the rank on which it fails, and the function that fails."""


def _planted(rank: int, num_ranks: int, folder: Path) -> dict[str, str]:
    limit_waits(10.0)  # of ranks that get no message about it
    run, found = Run(TP2), {}
    run.update(0)
    real = torch.save
    for name, (failing, target) in PLANTS.items():

        def fail(*args: Any, of_file: bool = target == "torch.save", **how: Any) -> Any:
            if of_file and not isinstance(args[1], Path):  # torch's writer uses it to put tensors into streams
                return real(*args, **how)
            raise OSError(28, "No space left on device")

        with patch(target, fail) if rank == failing else nullcontext(), pytest.raises(CheckpointError) as caught:
            run.save(folder / name)
        found[name] = str(caught.value)
    return found


def test_any_failed_write_raises_on_all_ranks_without_a_hang(host, tmp_path):
    for found in host.run(_planted, 2, tmp_path):
        assert {name: said for name, said in found.items() if "No space left on device" not in said} == {}
        assert found.keys() == PLANTS.keys()


def _unreadable(rank: int, num_ranks: int, folder: Path) -> list[str]:
    good, cut, lost = (folder / name for name in ("good", "cut", "lost"))
    Run(TP2).save(good)
    dist.barrier()
    if rank == 0:
        for bad in (cut, lost):
            shutil.copytree(good, bad)
        os.truncate(cut / "policy/weights/iter_0000000/__1_0.distcp", 3000)
        (lost / "policy/weights/iter_0000000/.metadata").unlink()
    dist.barrier()
    wider, deeper = replace(TP2, kind="qwen2"), replace(TP2, num_layers=3)
    found = []
    for mesh, place in ((TP2, cut), (TP2, lost), (wider, good), (deeper, good), (TP2, folder / "nowhere")):
        run = Run(mesh)
        with pytest.raises(CheckpointError) as caught:
            run.load(place)
        found.append(str(caught.value))
    return found


def test_a_damaged_or_foreign_checkpoint_raises_on_all_ranks(host, tmp_path):
    for cut, lost, wider, deeper, nowhere in host.run(_unreadable, 2, tmp_path):
        assert str(tmp_path / "cut") in cut
        assert str(tmp_path / "lost") in lost
        assert "is of another model: it lacks" in wider
        assert "linear_qkv.bias" in wider
        assert "decoder.layers.2." in deeper
        assert "does not exist" in nowhere


def _killed(rank: int, num_ranks: int, folder: Path) -> None:
    from torch.distributed.checkpoint import FileSystemWriter

    run, manager = Run(TP2), None
    if rank == 0:
        manager = _manager(folder)
    for step in (1, 2):
        run.update(step)
        if manager is not None:
            manager.init_tmp_checkpoint(step, {"step": step})
        dist.barrier()
        if step == 2 and rank == 0:
            FileSystemWriter.write_data = _die
        run.save(folder / f"tmp_step_{step}")
        if manager is not None:
            manager.finalize_checkpoint(folder / f"tmp_step_{step}")


def _die(self: Any, plan: Any, planner: Any) -> Any:
    Path(self.path, "__0_0.distcp").write_bytes(b"half of it")
    os.kill(os.getpid(), signal.SIGKILL)


def _manager(folder: Path) -> CheckpointManager:
    from nemo_rl.config import CheckpointingConfig

    return CheckpointManager(CheckpointingConfig.build(checkpoint_dir=str(folder), metric_name=None))


def _after_the_kill(rank: int, num_ranks: int, folder: Path) -> int:
    run = Run(TP2, seed=5)
    run.load(folder)
    return run.backend.scheduler.num_steps


def test_a_sigkill_while_saving_leaves_the_previous_checkpoint(host, tmp_path):
    with pytest.raises(AssertionError, match="SIGKILL|Connection"):
        host.run(_killed, 2, tmp_path)
    manager = _manager(tmp_path)
    manager.claim()
    found = manager.find_resumable()
    assert found == tmp_path / "step_1"
    assert host.run(_after_the_kill, 2, found) == [1, 1]


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(63)} | {"?": 63}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")


def _save_at_first(rank: int, num_ranks: int, mesh: Mesh, folder: Path) -> None:
    Run(mesh).save(folder)


@pytest.mark.parametrize(
    ("num_ranks", "mesh"),
    [
        pytest.param(2, TP2, id="tp2"),
        pytest.param(2, Mesh("qwen2", pp=2, precision=BF16), id="pp2-tied-bf16"),
        pytest.param(2, EP2, id="ep2"),
        pytest.param(2, REWARD, id="reward"),
        pytest.param(2, HYBRID, id="hybrid-tp2"),
        pytest.param(2, Mesh("minimax_m2", ep=2), id="joint-norms-ep2"),
    ],
)
def test_an_export_equals_the_hub_model_bit_for_bit(host, tmp_path, monkeypatch, num_ranks, mesh):
    host.run(_save_at_first, num_ranks, mesh, tmp_path / "step_1")
    weights = MegatronTraining().find_weights(tmp_path / "step_1")
    MegatronTraining().complete_checkpoint(weights, _tokenizer(), "bfloat16")
    monkeypatch.setattr("nemo_rl.models.megatron.checkpoints.folder.MAX_FILE_BYTES", 20_000)
    MegatronTraining().export(weights, tmp_path / "hf")
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    found = {name: value for file in files for name, value in load_file(file).items()}
    with saved(mesh.model()) as folder:
        given = load_file(folder / "model.safetensors")
    dtype = getattr(torch, mesh.precision)
    expected = {name: value.to(dtype) for name, value in given.items()}
    assert len(files) > 1
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    kind = AutoModelForSequenceClassification if mesh.scores else AutoModelForCausalLM
    loaded = kind.from_pretrained(tmp_path / "hf")
    assert loaded.dtype is dtype
    assert loaded.config.architectures == [type(mesh.model()).__name__]
    if mesh.kind != "qwen2":  # whose tokenizer class keeps only its own vocabulary
        check = MegatronTraining().verify_export(weights, tmp_path / "hf")
        # The weights are equal, as compared above, but a processor may round matrix products by address.
        assert check.max_difference < 1e-6
        assert check.num_values == 3 if mesh.scores else check.num_values > 10
    handed_on = kind.from_pretrained(weights / "model" / "consolidated")
    assert handed_on.dtype is torch.bfloat16
    (embedding,) = (value for name, value in expected.items() if "embed" in name)
    assert torch.equal(handed_on.get_input_embeddings().weight, embedding.bfloat16())


def _rewards(rank: int, num_ranks: int, folder: Path) -> torch.Tensor:
    run = Run(REWARD)
    run.update(0)
    run.save(folder)
    assert "score.weight" in dict(run.backend.iterate_weights())
    rows = build_score_inputs(mesh_parity.batch(0), InputLayout(packed=True), CPU)
    return backend_cases.scored(run.backend, rows)[0]


def test_an_exported_reward_model_scores_like_the_trained_model(host, tmp_path):
    scores, _ = host.run(_rewards, 2, tmp_path / "step_1")
    weights = MegatronTraining().find_weights(tmp_path / "step_1")
    _tokenizer().save_pretrained(weights)
    MegatronTraining().export(weights, tmp_path / "hf")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", num_labels=1).eval()
    data = mesh_parity.batch(0)
    with torch.no_grad():
        rows = zip(data["input_ids"], data["input_lengths"].tolist(), strict=True)
        expected = torch.cat([model(input_ids=ids[None, :length]).logits[0] for ids, length in rows])
    assert (scores - expected).abs().max() < 1e-5
    assert expected.std() > 0.1


class _Bomb:
    """Writes a marker file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def _load_refused(rank: int, num_ranks: int, folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        Run(Mesh()).load(folder)
    return str(refused.value)


def _plant_object(folder: Path, marker: Path) -> None:
    """Replace the one object between the tensors, which Megatron Core reads first, by code."""
    described, content = folder / ".metadata", io.BytesIO()
    torch.save([_Bomb(marker)], content)
    (folder / "__0_0.distcp").write_bytes(content.getvalue())
    found = pickle.loads(described.read_bytes())
    place = _StorageInfo("__0_0.distcp", 0, len(content.getvalue()), None)
    found.storage_data = dict.fromkeys(found.storage_data, place)
    described.write_bytes(pickle.dumps(found))


PLACES = ("weights/iter_0000000", "optimizer/optim")


@pytest.mark.parametrize(
    "file",
    [
        *(f"{place}/{name}" for place in PLACES for name in (".metadata", "common.pt", "__0_0.distcp")),
        *("optimizer/trainer.pt", "optimizer/rng/rank_00000.pt"),
    ],
)
def test_code_in_a_checkpoint_is_refused_by_name(host, tmp_path, file):
    host.run(_write, 1, Mesh(), tmp_path / "step_1")
    planted, marker = tmp_path / "step_1" / "policy" / file, tmp_path / "executed"
    if planted.name == ".metadata":
        planted.write_bytes(pickle.dumps(_Bomb(marker)))
    elif planted.suffix == ".distcp":
        _plant_object(planted.parent, marker)
    else:
        torch.save({"args": _Bomb(marker)}, planted)
    said = host.run(_load_refused, 1, tmp_path / "step_1")[0]
    assert f"{planted} is refused: it names posix.system" in said
    assert not marker.exists()


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_code_in_a_checkpoint_is_refused_by_exports(host, tmp_path, file):
    host.run(_save_at_first, 1, Mesh(), tmp_path / "step_1")
    weights, marker = MegatronTraining().find_weights(tmp_path / "step_1"), tmp_path / "executed"
    _tokenizer().save_pretrained(weights)
    if file == ".metadata":
        (weights / "iter_0000000" / file).write_bytes(pickle.dumps(_Bomb(marker)))
    else:
        _plant_object(weights / "iter_0000000", marker)
    with pytest.raises(CheckpointError, match=f"iter_0000000/{file} is refused: it names posix.system"):
        MegatronTraining().export(weights, tmp_path / "hf")
    assert not marker.exists()


def test_an_export_names_missing_parts(host, tmp_path):
    host.run(_save_at_first, 1, Mesh(), tmp_path / "step_1")
    weights = MegatronTraining().find_weights(tmp_path / "step_1" / "policy")
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        MegatronTraining().export(weights, tmp_path / "hf")
    _tokenizer().save_pretrained(weights)
    hf_config("qwen2", num_hidden_layers=2).save_pretrained(weights)
    with pytest.raises(CheckpointError, match="is not the qwen2 of its config.json: it lacks .*linear_qkv.bias"):
        MegatronTraining().export(weights, tmp_path / "hf")
    with pytest.raises(CheckpointError, match="is no policy checkpoint of Megatron Core"):
        MegatronTraining().find_weights(tmp_path)
    os.truncate(weights / "iter_0000000" / "__0_0.distcp", 2000)
    hf_config("llama", num_hidden_layers=2).save_pretrained(weights)
    with pytest.raises(CheckpointError, match="iter_0000000 (cannot be read|is damaged)"):
        MegatronTraining().export(weights, tmp_path / "hf2")
