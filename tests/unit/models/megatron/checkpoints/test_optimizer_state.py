"""Optimizers of GPUs, on CPUs: an imitation of Transformer Engine's Adam, and Megatron Core's for two devices.

What is shown: a checkpoint restores every bit, other optimizers read it, and one with wrong values is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoint_models import Mesh, Run, differing, paths_in
from engine_adam import divided, engine_adam, joined
from rank_host import needs_megatron
from torch import Tensor
from two_devices import on_host, two_devices

from nemo_rl.models.megatron.checkpoints.folder import SavedTensors
from nemo_rl.models.training.interfaces import CheckpointPaths
from nemo_rl.utils.errors import CheckpointError

pytestmark = needs_megatron

DP2 = Mesh(distributed=True, precision="bfloat16")
MASTERS = "optimizer.state.fp32_param."


def test_a_float32_weight_splits_into_bfloat16_and_a_remainder() -> None:
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    ties = torch.tensor([1.0, -3.0]).view(torch.int32) + 0x8000
    weights = torch.cat([bits, ties]).view(torch.float32)
    weights = weights[weights.isfinite() & (weights.abs() < 1e38)]
    rounded, remainders = divided(weights)
    assert torch.equal(joined(rounded, remainders), weights)
    assert ((rounded.float() - weights).abs() <= weights.abs() * 2**-8 + 2.0**-133).all()


def _resume(rank: int, num_ranks: int, mesh: Mesh, folder: Path) -> dict[str, Any]:
    with engine_adam():
        run = Run(mesh)
        for step in range(3):
            run.update(step)
        run.save(folder)
        saved = run.state()
        losses = [run.update(step) for step in (3, 4)]
        again = Run(mesh, seed=5)
        again.load(folder)
        kinds = {type(each).__name__ for each in again.optimizers()}
        loaded = differing(saved, again.state())
        resumed = [again.update(step) for step in (3, 4)]
        ended = differing(run.state(), again.state())
    return {"kinds": kinds, "losses": losses, "resumed": resumed, "loaded": loaded, "ended": ended}


@pytest.mark.parametrize(
    ("num_ranks", "mesh"),
    [
        pytest.param(2, DP2, id="dp2"),
        pytest.param(2, replace(DP2, kind="qwen3_moe", ep=2), id="ep2"),
        pytest.param(1, replace(DP2, precision="float32"), id="float32"),
    ],
)
def test_transformer_engines_adam_resumes_bit_for_bit(host, tmp_path, num_ranks, mesh) -> None:
    for found in host.run(_resume, num_ranks, mesh, tmp_path):
        assert found["kinds"] == {"FusedAdam"}
        assert found["loaded"] == []
        assert found["ended"] == []
        assert found["resumed"] == found["losses"]
    weights, optimizer = (
        SavedTensors(tmp_path / "policy" / kind) for kind in ("weights/iter_0000000", "optimizer/optim")
    )
    masters = [name for name in optimizer.names if name.startswith(MASTERS)]
    assert bool(masters) is (mesh.precision == "bfloat16")
    for name in masters:
        master, weight = optimizer.read([name]), weights.read([name.removeprefix(MASTERS)])
        assert master.dtype is torch.float32
        assert torch.equal(master.bfloat16(), weight)
        assert not torch.equal(master, weight.float()), "the float32 weight has no more bits than the rounded one"


def _hand_over(rank: int, num_ranks: int, folder: Path, first_is_engines: bool) -> tuple[list[str], float, float]:
    def one(seed: int) -> Run:
        return Run(DP2, seed)

    adams = (engine_adam, _plain) if first_is_engines else (_plain, engine_adam)
    with adams[0]():
        run = one(1)
        for step in range(2):
            run.update(step)
        run.save(folder)
        ours = _masters(run)
        loss = run.update(2)
    with adams[1]():
        again = one(5)
        again.load(folder)
        theirs = _masters(again)
        resumed = again.update(2)
    return differing(ours, theirs), loss, resumed


@contextmanager
def _plain() -> Iterator[None]:
    yield


def _masters(run: Run) -> dict[str, Tensor]:
    """Return the float32 weights of this rank, whichever optimizer holds them."""
    found = {}
    for number, optimizer in enumerate(run.optimizers()):
        for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            master = optimizer.state[parameter].get("master_param", parameter)
            found[f"{number}.{index}"] = master.detach().float().clone()
    return found


@pytest.mark.parametrize("first_is_engines", [True, False])
def test_transformer_engines_adam_and_torchs_read_each_others_checkpoints(host, tmp_path, first_is_engines) -> None:
    for differ, loss, resumed in host.run(_hand_over, 2, tmp_path, first_is_engines):
        assert differ == []
        assert resumed == loss


def _with_remainders(rank: int, num_ranks: int, folder: Path, read_by_engine: bool) -> str:
    from nemo_rl.models.megatron import optimizer

    config = optimizer.OptimizerConfig
    old = patch.object(optimizer, "OptimizerConfig", lambda **keys: config(**keys | {"store_param_remainders": True}))
    with engine_adam(), old:
        run = Run(DP2)
        run.update(0)
        run.save(folder)
    with engine_adam() if read_by_engine else _plain():
        run = Run(DP2, seed=5)
        with pytest.raises(CheckpointError) as caught:
            run.load(folder)
    return str(caught.value)


@pytest.mark.parametrize("read_by_engine", [True, False])
def test_remainders_that_were_saved_as_weights_are_refused_by_name(host, tmp_path, read_by_engine) -> None:
    for message in host.run(_with_remainders, 2, tmp_path, read_by_engine):
        assert "has float32 weights of " in message
        assert "lower 16 bits" in message
        assert "checkpointing.allow_changed=[policy.optimizer]" in message


def _weights_of_another(rank: int, num_ranks: int, folder: Path) -> str:
    import shutil

    for seed, name in ((1, "a"), (2, "b")):
        run = Run(replace(DP2, distributed=False), seed)
        run.update(0)
        run.save(folder / name)
    shutil.rmtree(folder / "a/policy/optimizer")
    shutil.copytree(folder / "b/policy/optimizer", folder / "a/policy/optimizer")
    with pytest.raises(CheckpointError) as caught:
        run.load(folder / "a")
    return str(caught.value)


def test_float32_weights_of_another_checkpoint_are_refused(host, tmp_path) -> None:
    (message,) = host.run(_weights_of_another, 1, tmp_path)
    assert "are not those of the weights folder" in message
    assert str(tmp_path / "a") in message


HALF_ON_HOST = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}


def _offloaded(seed: int = 1, *, overlaps: bool = False) -> Run:
    """Make a run whose optimizer updates half of the weights on the host; `move_optimizer_state` has an effect."""
    run = Run(replace(DP2, options=HALF_ON_HOST | {"overlap_cpu_optimizer_d2h_h2d": overlaps}), seed)
    run.backend._takes_turns = True
    return run


def _update(run: Run, step: int) -> float:
    torch.manual_seed(step)
    return run.update(step)


def _states(run: Run) -> dict[str, Tensor]:
    """Return the states of all optimizers that update, and the weights."""
    (inner,) = run.optimizers()
    found = {f"weight {name}": weight for name, weight in run.backend.chunks[0].named_parameters()}
    for number, each in enumerate(inner.sub_optimizers):
        parameters = [parameter for group in each.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            found[f"{number}.{index}.parameter"] = parameter
            found |= {f"{number}.{index}.{name}": value for name, value in each.state[parameter].items()}
    return {name: value.detach().clone() for name, value in found.items()}


def _misplaced(run: Run, *, at_rest: bool) -> list[str]:
    """Return states that are not where their optimizer needs them, or that two optimizers do not share."""
    (inner,), wrong = run.optimizers(), []
    for each in inner.sub_optimizers:
        of_host = each is not inner.gpu_optimizer
        for parameter, state in each.state.items():
            assert state["exp_avg"] is inner.state[inner.inner_param_to_orig_param[parameter]]["exp_avg"]
            tensors = [parameter.data, state["exp_avg"], state["exp_avg_sq"]]
            wrong += [
                f"{of_host} {on_host(tensor)}" for tensor in tensors[1:] if on_host(tensor) != (of_host or at_rest)
            ]
    return wrong


def _in_turns(rank: int, num_ranks: int, overlaps: bool) -> dict[str, Any]:
    with two_devices():
        alone, run = _offloaded(overlaps=overlaps), _offloaded(overlaps=overlaps)
        kinds = [each is run.optimizers()[0].gpu_optimizer for each in run.optimizers()[0].sub_optimizers]
        expected, losses, misplaced = [], [], []
        for step in range(3):
            expected.append(_update(alone, step))
            run.backend.move_optimizer_state(to_host=False)
            losses.append(_update(run, step))
            misplaced += _misplaced(run, at_rest=False)
            run.backend.move_optimizer_state(to_host=True)
            misplaced += _misplaced(run, at_rest=True)
        differ = differing(_states(alone), _states(run))
    return {"kinds": set(kinds), "losses": losses, "expected": expected, "misplaced": misplaced, "differ": differ}


@pytest.mark.parametrize("overlaps", [False, True])
def test_host_optimizer_state_stays_while_engines_use_the_gpu(host, overlaps) -> None:
    for found in host.run(_in_turns, 2, overlaps):
        assert found["kinds"] == {True, False}, "both devices update something"
        assert found["misplaced"] == []
        assert found["differ"] == []
        assert found["losses"] == found["expected"]


def _resume_offloaded(rank: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    with two_devices():
        run = _offloaded()
        for step in range(3):
            _update(run, step)
        run.backend.move_optimizer_state(to_host=True)
        run.save(folder)  # offloaded, as after a validation
        run.backend.move_optimizer_state(to_host=False)
        saved, losses = _states(run), [_update(run, step) for step in (3, 4)]
        again = _offloaded(seed=5)
        again.load(folder)
        loaded, misplaced = differing(saved, _states(again)), _misplaced(again, at_rest=False)
        resumed = [_update(again, step) for step in (3, 4)]
        ended = differing(_states(run), _states(again))
        again.backend.load(CheckpointPaths(paths_in(folder).weights))
        left = sum(map(len, (state for each in again.optimizers()[0].sub_optimizers for state in each.state.values())))
    found = {"losses": losses, "resumed": resumed, "loaded": loaded, "misplaced": misplaced}
    return found | {"ended": ended, "left": left}


def test_an_optimizer_on_two_devices_resumes_bit_for_bit(host, tmp_path) -> None:
    for found in host.run(_resume_offloaded, 2, tmp_path):
        assert found["loaded"] == []
        assert found["misplaced"] == []
        assert found["ended"] == []
        assert found["resumed"] == found["losses"]
        assert found["left"] == 0, "weights alone start the optimizer without moments"
