"""Checkpoints restore every bit, on any number of ranks, and load with from_pretrained."""

import io
import os
import pickle
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from policy_helpers import (
    hf_logprobs,
    policy_config,
    process_group,
    random_batch,
    run_ranks,
    save_tiny_model,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.optim.lr_scheduler import SequentialLR
from trained_states import assert_equal_states, update, whole_state
from transformers import AutoModelForCausalLM

from nemo_rl.config import OptimizerConfig, PolicyConfig
from nemo_rl.models.dtensor import optimizer
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.checkpoints import model_files as checkpoint_io
from nemo_rl.models.dtensor.checkpoints import training_state
from nemo_rl.models.dtensor.optimizer import build_optimizer, build_scheduler, hyperparameters_now
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.models.training.interfaces import CheckpointPaths
from nemo_rl.utils.errors import CheckpointError, ConfigError

CPU = torch.device("cpu")
SCHEDULE = [
    {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 2}},
    {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 100}},
    {"milestones": [2]},
]


PRECISION: dict[str, str] = {}


def _worker(name: str, **values) -> tuple[PolicyWorker, object]:
    config = policy_config(name, scheduler=SCHEDULE, **PRECISION, **values)
    return PolicyWorker(DTensorBackend(config, CPU), config), config


def _save(rank: int, world_size: int, name: str, step: str) -> tuple[dict, dict]:
    """Train twice, save, train twice more; return the state at the save and at the end."""
    worker, config = _worker(name)
    for seed in (1, 2):
        update(worker, config, seed, rank, world_size)
    worker.save_checkpoint(f"{step}/weights", f"{step}/optimizer")
    saved = whole_state(worker)
    for seed in (3, 4):
        update(worker, config, seed, rank, world_size)
    return saved, whole_state(worker)


def _resume(rank: int, world_size: int, name: str, step: str) -> tuple[dict, dict, torch.Tensor]:
    worker, config = _worker(name)
    worker.load_checkpoint(f"{step}/weights", f"{step}/optimizer")
    loaded = whole_state(worker)
    reference = worker.get_reference_policy_logprobs(random_batch(rows=2), [2])
    for seed in (3, 4):
        update(worker, config, seed, rank, world_size)
    return loaded, whole_state(worker), reference


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(world_size, tie, tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m", tie=tie)
    step = str(tmp_path / "step_2" / "policy")
    straight = run_ranks(_save, world_size, name, step)
    resumed = run_ranks(_resume, world_size, name, step)
    original = AutoModelForCausalLM.from_pretrained(name).eval()
    with torch.no_grad():
        want = hf_logprobs(original, random_batch(rows=2))
    for (saved, end), (loaded, end_again, reference) in zip(straight, resumed, strict=True):
        assert any(key.startswith("optim.exp_avg_sq") for key in saved)
        assert_equal_states(saved, loaded)
        assert_equal_states(end, end_again)
        # The reference is the model the run started from, not the checkpoint.
        torch.testing.assert_close(reference.double(), want, rtol=0, atol=2e-4)


def test_a_checkpoint_loads_on_another_number_of_ranks(tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m", "llama")
    step = str(tmp_path / "step")
    saved, _ = run_ranks(_save, 2, name, step)[0]
    for world_size in (1, 3):
        for loaded, _, _ in run_ranks(_resume, world_size, name, step):
            assert_equal_states(saved, loaded)


@pytest.mark.parametrize(("arch", "tie"), [("qwen2", True), ("qwen3", False), ("gemma3", True)])
def test_saved_weights_load_with_from_pretrained(arch, tie, tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m", arch, tie=tie)
    step = str(tmp_path / "step")
    saved, _ = run_ranks(_save, 2, name, step)[0]
    folder = Path(step) / "weights" / "model"
    assert (folder / "config.json").exists()
    assert not (folder / "sharded").exists()
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == torch.float32
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, saved[f"weight.{key}"])
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is tie


def test_large_models_are_written_in_several_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint_io, "MAX_FILE_BYTES", 100_000)
    name = save_tiny_model(tmp_path / "m")
    with process_group():
        worker, _ = _worker(name)
        worker.save_checkpoint(str(tmp_path / "w"))
        want = {key: tensor.clone() for key, tensor in worker.iterate_weights()}
        worker.load_checkpoint(str(tmp_path / "w"))
        assert all(torch.equal(want[key], tensor) for key, tensor in worker.iterate_weights())
    files = list((tmp_path / "w" / "model").glob("*.safetensors"))
    assert len(files) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "w" / "model")
    assert all(torch.equal(parameter, want[key]) for key, parameter in model.named_parameters())


def test_a_checkpoint_from_before_the_first_update_has_a_fresh_optimizer(tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m")
    with process_group():
        worker, config = _worker(name)
        worker.save_checkpoint(str(tmp_path / "w"), str(tmp_path / "o"))
        update(worker, config, 1)
        again, _ = _worker(name)
        again.load_checkpoint(str(tmp_path / "w"), str(tmp_path / "o"))
        update(again, config, 1)
        assert_equal_states(whole_state(worker), whole_state(again))


def test_random_number_states_are_restored(tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m")

    def draw():
        return random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item()

    with process_group():
        worker, _ = _worker(name)
        np.random.randn()  # leaves numpy with a cached second number
        worker.save_checkpoint(str(tmp_path / "w"), str(tmp_path / "o"))
        want = draw()
        worker.load_checkpoint(str(tmp_path / "w"), str(tmp_path / "o"))
        assert draw() == want


def test_folders_without_a_checkpoint_are_refused(tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m")
    (tmp_path / "empty").mkdir()
    with process_group():
        worker, _ = _worker(name)
        with pytest.raises(CheckpointError, match="no \\*.safetensors"):
            worker.backend.load(CheckpointPaths(tmp_path / "empty"))
        worker.save_checkpoint(str(tmp_path / "w"))
        with pytest.raises(CheckpointError, match="trainer.pt"):
            worker.load_checkpoint(str(tmp_path / "w"), str(tmp_path / "empty"))
        other = save_tiny_model(tmp_path / "other", hidden_size=32)
        bigger, _ = _worker(other)
        with pytest.raises(CheckpointError, match="does not fit Qwen2ForCausalLM"):
            bigger.load_checkpoint(str(tmp_path / "w"))


NEW_SCHEDULE = [
    {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 4}},
    {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 8}},
    {"milestones": [4]},
]


@pytest.mark.parametrize("scheduler", [None, SCHEDULE, NEW_SCHEDULE])
def test_new_settings_apply_from_the_resumed_step(tmp_path, scheduler) -> None:
    """Moments continue; rate, decay and schedule are those of a run that had the new settings from its first step."""
    name = save_tiny_model(tmp_path / "m")
    new = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-5, "weight_decay": 0.3, "betas": [0.8, 0.99]}}
    with process_group():
        worker, config = _worker(name)
        for seed in (1, 2, 3):
            update(worker, config, seed)
        worker.save_checkpoint(str(tmp_path / "w"), str(tmp_path / "o"))
        saved = whole_state(worker)

        config = policy_config(name, scheduler=scheduler, optimizer=new)
        resumed = PolicyWorker(DTensorBackend(config, CPU), config)
        resumed.load_checkpoint(str(tmp_path / "w"), str(tmp_path / "o"))
        loaded = whole_state(resumed)
        want = _rates(scheduler, base=1e-5, steps=6)
        rates = []
        for seed in (4, 5, 6):
            rates.append(resumed.backend.learning_rate())
            update(resumed, config, seed)
    assert rates == want[3:6]
    group = resumed.backend.optimizer.param_groups[0]
    assert (group["weight_decay"], list(group["betas"])) == (0.3, [0.8, 0.99])
    moments = {key: tensor for key, tensor in saved.items() if key != "lr"}
    assert_equal_states(moments, {key: loaded[key] for key in moments})


def _rates(scheduler, base: float, steps: int) -> list[float]:
    """Return the learning rates of an uninterrupted run of these steps."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    config = policy_config("m", scheduler=scheduler, optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": base}})
    optimizer = build_optimizer([parameter], config.optimizer)
    built = build_scheduler(optimizer, config.scheduler)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        built.step()
    return rates


def test_optimizer_specific_state_survives_new_settings() -> None:
    """Optimizers such as Prodigy adapt values in their groups that are not arguments."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5, weight_decay=0.1)
    optimizer.param_groups[0]["d"] = 3.0
    settings = {"optimizer": {"kwargs": {"lr": 0.5, "weight_decay": 0.1}}}
    saved = {"scheduler": {"last_epoch": 2}, "settings": {"optimizer": {"kwargs": {"lr": 0.9}}}}
    (values,) = hyperparameters_now(optimizer, build_scheduler(optimizer, None), settings, saved)
    assert values == {"lr": 0.5, "initial_lr": 0.5, "weight_decay": 0.1, "momentum": 0}


def test_another_optimizer_starts_without_moments(tmp_path, caplog) -> None:
    name = save_tiny_model(tmp_path / "m")
    with process_group():
        worker, config = _worker(name)
        update(worker, config, 1)
        worker.save_checkpoint(str(tmp_path / "w"), str(tmp_path / "o"))
        sgd = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.5}}
        config = policy_config(name, scheduler=SCHEDULE, optimizer=sgd)
        other = PolicyWorker(DTensorBackend(config, CPU), config)
        other.load_checkpoint(str(tmp_path / "w"), str(tmp_path / "o"))
        assert not other.backend.optimizer.state
        assert other.backend.learning_rate() == _rates(SCHEDULE, base=0.5, steps=2)[1]
    assert "starts without moments" in caplog.text


@pytest.mark.parametrize("file", ["trainer.pt", "rng/rank_00000.pt", "optim/.metadata", "optim/__0_0.distcp"])
def test_a_damaged_training_state_is_named(tmp_path, file) -> None:
    name = save_tiny_model(tmp_path / "m")
    with process_group():
        worker, config = _worker(name)
        update(worker, config, 1)
        worker.save_checkpoint(str(tmp_path / "w"), str(tmp_path / "o"))
        damaged = tmp_path / "o" / file
        damaged.write_bytes(damaged.read_bytes()[:50])
        with pytest.raises(CheckpointError, match=str(damaged.parent)):
            worker.load_checkpoint(str(tmp_path / "w"), str(tmp_path / "o"))


class _Bomb:
    """Writes a marker file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("file", ["trainer.pt", "rng/rank_00000.pt", "optim/.metadata", "optim/__0_0.distcp"])
def test_code_in_a_training_state_is_refused_by_name(tmp_path, file) -> None:
    name, marker = save_tiny_model(tmp_path / "m"), tmp_path / "executed"
    with process_group():
        worker, config = _worker(name)
        update(worker, config, 1)
        worker.save_checkpoint(str(tmp_path / "w"), str(tmp_path / "o"))
        planted = tmp_path / "o" / file
        if file == "optim/.metadata":
            planted.write_bytes(pickle.dumps(_Bomb(marker)))
        elif file == "optim/__0_0.distcp":
            _plant_everywhere(planted, marker)
        else:
            torch.save({"settings": _Bomb(marker)}, planted)
        with pytest.raises(CheckpointError, match=f"{planted} is refused: it names posix.system"):
            worker.load_checkpoint(str(tmp_path / "w"), str(tmp_path / "o"))
    assert not marker.exists()


def _plant_everywhere(data: Path, marker: Path) -> None:
    """Replace every value of a file of values by code."""
    content = io.BytesIO()
    torch.save(_Bomb(marker), content)
    data.write_bytes(content.getvalue())
    described = data.with_name(".metadata")
    found = pickle.loads(described.read_bytes())
    place = _StorageInfo(data.name, 0, len(content.getvalue()), None)
    found.storage_data = dict.fromkeys(found.storage_data, place)
    described.write_bytes(pickle.dumps(found))


def _fail_on_one_rank(rank: int, world_size: int, name: str, step: str) -> str:
    """Save where the last rank cannot write; then run a training step, which needs all ranks."""
    worker, config = _worker(name)
    update(worker, config, 1, rank, world_size)
    if rank == world_size - 1:
        (Path(step) / f"rng/rank_{rank:05d}.pt").mkdir(parents=True)  # a folder in place of a file
    torch.distributed.barrier()
    with pytest.raises(CheckpointError) as failure:
        worker.save_checkpoint(f"{step}_weights", step)
    update(worker, config, 2, rank, world_size)
    return str(failure.value)


def test_a_rank_that_cannot_write_makes_all_ranks_fail_and_training_continues(tmp_path) -> None:
    said = run_ranks(_fail_on_one_rank, 2, save_tiny_model(tmp_path / "m"), str(tmp_path / "o"))
    assert said[0] == said[1] and "Is a directory" in said[0]


def _schedule_of(scheduler, steps: int = 4) -> list[float]:
    parameter = torch.nn.Parameter(torch.zeros(1))
    config = policy_config("m", scheduler=scheduler, optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}})
    optimizer = build_optimizer([parameter], config.optimizer)
    built = build_scheduler(optimizer, config.scheduler)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        built.step()
    assert isinstance(built, SequentialLR) is isinstance(scheduler, list) or len(scheduler) == 1
    return rates


def test_schedulers_accept_all_three_forms() -> None:
    linear = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.5, "total_iters": 2}}
    assert _schedule_of(None) == [1.0] * 4
    assert _schedule_of(linear) == pytest.approx([0.5, 0.75, 1.0, 1.0])
    assert _schedule_of([linear]) == pytest.approx([0.5, 0.75, 1.0, 1.0])
    assert _schedule_of(SCHEDULE) == pytest.approx([0.1, 0.55, 1.0, 1.0])


def test_wrong_names_and_arguments_are_refused_with_advice() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    bad = policy_config("m", optimizer={"name": "torch.optim.AdamWW", "kwargs": {}}).optimizer
    with pytest.raises(ConfigError, match="policy.optimizer.name='torch.optim.AdamWW' cannot be imported"):
        build_optimizer([parameter], bad)
    bad = policy_config("m", optimizer={"name": "torch.optim.SGD", "kwargs": {"beta": 1}}).optimizer
    with pytest.raises(ConfigError, match="policy.optimizer.kwargs do not fit torch.optim.SGD"):
        build_optimizer([parameter], bad)


def test_a_fused_optimizer_resumes_from_an_unfused_one(tmp_path, monkeypatch) -> None:
    """As in a run that an older version began: it stays fused, its step counts move."""
    name = save_tiny_model(tmp_path / "m")
    step = str(tmp_path / "step")
    with process_group():
        with monkeypatch.context() as older:
            older.setattr(optimizer, "_may_fuse", lambda cls, parameters: False)
            plain, config = _worker(name)
        update(plain, config, 1)
        plain.save_checkpoint(f"{step}/weights", f"{step}/optimizer")
        fused, _ = _worker(name)
        fused.load_checkpoint(f"{step}/weights", f"{step}/optimizer")
        assert [group["fused"] for group in fused.backend.optimizer.param_groups] == [True]
        assert_equal_states(whole_state(plain), whole_state(fused))
        for worker in (plain, fused):
            update(worker, config, 2)
        left, right = whole_state(plain), whole_state(fused)
        for key, value in left.items():
            torch.testing.assert_close(right[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("device", "name", "kwargs", "fused"),
    [
        ("cuda", "torch.optim.AdamW", {}, True),
        ("cuda", "torch.optim.SGD", {"momentum": 0.9}, True),
        ("cuda", "torch.optim.AdamW", {"fused": False}, False),
        ("cuda", "torch.optim.AdamW", {"foreach": False}, None),
        ("cuda", "torch.optim.Adadelta", {}, None),
        ("cpu", "torch.optim.AdamW", {}, True),
        ("cpu", "torch.optim.AdamW", {"foreach": False, "fused": False}, False),
    ],
)
def test_the_optimizer_is_fused_unless_configured_otherwise(device, name, kwargs, fused) -> None:
    with FakeTensorMode():
        parameter = torch.nn.Parameter(torch.empty(2, 2, device=device))
        made = build_optimizer([parameter], OptimizerConfig.build(name=name, kwargs={"lr": 0.1, **kwargs}))
    assert made.param_groups[0].get("fused") is fused


def _save_in_background(rank: int, world_size: int, name: str, step: str) -> tuple[dict, dict]:
    """Save twice while training continues; each save is written only after the next update."""
    worker, config = _worker(name)
    states = []
    for seed in (1, 2):
        update(worker, config, seed, rank, world_size)
        states.append(whole_state(worker))
        staged = []
        stage = worker.backend.stage_save

        def later(paths, stage=stage, staged=staged):
            write, go = stage(paths), threading.Event()
            staged.append(go)
            return lambda: (go.wait(20), write())

        worker.backend.stage_save = later
        worker.save_checkpoint(f"{step}_{seed}/weights", f"{step}_{seed}/optimizer", background=True)
        worker.backend.stage_save = stage
        assert not worker.checkpoint_is_written()
        update(worker, config, seed + 10, rank, world_size)
        staged[0].set()
        worker.finish_checkpoint()
        assert worker.checkpoint_is_written()
    return tuple(states)


@pytest.mark.parametrize(("world_size", "precision"), [(1, "float32"), (2, "bfloat16")])
def test_a_background_checkpoint_holds_the_state_at_its_request(world_size, precision, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(PRECISION, "precision", precision)
    name, step = save_tiny_model(tmp_path / "m", tie=True), str(tmp_path / "step")
    saved = run_ranks(_save_in_background, world_size, name, step)
    for number, seed in enumerate((1, 2)):
        for loaded, _, _ in run_ranks(_resume, world_size, name, f"{step}_{seed}"):
            assert_equal_states(loaded, saved[0][number])


def _write_where_rank_1_cannot(rank: int, world_size: int, name: str, step: str) -> str:
    worker, config = _worker(name)
    update(worker, config, 1, rank, world_size)
    if rank == 1:
        training_state.rng_file = lambda path: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    worker.save_checkpoint(f"{step}/weights", f"{step}/optimizer", background=True)
    update(worker, config, 2, rank, world_size)
    with pytest.raises(CheckpointError) as failure:
        worker.finish_checkpoint()
    worker.finish_checkpoint()  # warns once
    return str(failure.value)


def test_a_rank_that_cannot_write_in_the_background_makes_all_ranks_fail(tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m")
    found = run_ranks(_write_where_rank_1_cannot, 2, name, str(tmp_path / "step"))
    assert found[0] == found[1] and "No space left on device" in found[0]


def test_one_scheduler_with_empty_milestones_is_used_alone() -> None:
    entry = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.25, "total_iters": 4}}
    rates = []
    for written in (entry, [entry], [entry, {"milestones": []}]):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = build_scheduler(optimizer, PolicyConfig.build(model_name="m", scheduler=written).scheduler)
        assert isinstance(scheduler, torch.optim.lr_scheduler.LinearLR)
        rates.append([optimizer.param_groups[0]["lr"]])
        for _ in range(5):
            optimizer.step()
            scheduler.step()
            rates[-1].append(optimizer.param_groups[0]["lr"])
    assert rates == [[0.25, 0.4375, 0.625, 0.8125, 1.0, 1.0]] * 3
