"""A dry run refuses parts named by a dotted path that cannot be used: each of the six kinds, before Ray starts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import ray
from pydantic import PositiveInt

from nemo_rl.config import REPOSITORY_ROOT, GRPOMasterConfig, SFTMasterConfig
from nemo_rl.environments.interfaces import EnvironmentInterface
from nemo_rl.launch.checks import CHECKS, Moment
from nemo_rl.launch.command_line import launch
from nemo_rl.models.generation.stepped import SteppedEngine
from nemo_rl.models.training.backends import TrainingBackend

CONFIGS = REPOSITORY_ROOT / "examples/configs"
GRPO, SFT = CONFIGS / "grpo_math_cpu.yaml", CONFIGS / "sft_cpu.yaml"
HERE = __name__


@dataclass
class Keys:
    rows: PositiveInt


class Loss:
    def __init__(self, rows: int = 1):
        self.rows = rows

    def __call__(self, model_output, data, global_valid_seqs, global_valid_toks):
        raise NotImplementedError


class Estimator:
    needs_logprobs = False

    def __init__(self, rows: int = 1):
        self.rows = rows

    def compute_advantage(self, prompt_ids, rewards, mask, **extras):
        raise NotImplementedError


class EstimatorWithoutItsAttribute(Estimator):
    def __getattribute__(self, name: str) -> Any:
        if name == "needs_logprobs":
            raise AttributeError(name)
        return super().__getattribute__(name)


class Source:
    def __init__(self, inner, rows: int = 1):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Game(EnvironmentInterface):
    config_class: ClassVar[type | None] = Keys

    def step(self, message_log_batch, metadata):
        raise NotImplementedError


class Engine(SteppedEngine):
    config_class: ClassVar[type | None] = Keys


class Backend(TrainingBackend):
    rank_class = "unused"
    config_class: ClassVar[type | None] = Keys


for _kind in (Engine, Backend):
    for _name in _kind.__abstractmethods__:
        setattr(_kind, _name, lambda self, *args: None)
    _kind.__abstractmethods__ = frozenset()

KINDS = {
    "loss": ("Loss", ["loss_fn.name={name}", "loss_fn.kwargs={keys}"]),
    "estimator": ("Estimator", ["grpo.adv_estimator.name={name}", "grpo.adv_estimator.kwargs={keys}"]),
    "source": ("Source", ["grpo.rollout_source.name={name}", "grpo.rollout_source.kwargs={keys}"]),
    "environment": ("Game", ["+env={{{name}: {keys}}}", "data.default.env_name={name}"]),
    "engine": ("Engine", ["policy.generation.backend={name}", "policy.generation.engine_kwargs={keys}"]),
    "training backend": (
        "Backend",
        ["policy.dtensor_cfg.enabled=false", "+policy.training_backend={{name: {name}, kwargs: {keys}}}"],
    ),
}
FAULTS = {
    "a missing module": ("no_such_module_of_mine.{made}", "{{}}", "cannot be imported (No module named"),
    "a missing class": (f"{HERE}.No{{made}}", "{{}}", "cannot be imported (module"),
    "wrong arguments": (f"{HERE}.{{made}}", "{{rwos: 1}}", "rwos is no argument of"),
}


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray, "init", lambda *_, **options: pytest.fail("Ray was started"))


def dry_run(*overrides: str, file: Path = GRPO, schema: Any = GRPOMasterConfig) -> int:
    return launch("", file, schema, lambda config: pytest.fail("a dry run starts nothing"), ["--dry-run", *overrides])


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_that_cannot_be_used_is_refused(kind: str, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    made, keys = KINDS[kind]
    name, arguments, message = (text.format(made=made) for text in FAULTS[fault])
    assert dry_run(*(key.format(name=name, keys=arguments) for key in keys)) == 2
    said = capsys.readouterr().err
    assert "ConfigError" in said and message in said, said
    assert fault == "wrong arguments" or name in said


def test_parts_that_fit_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    named = [f"{part}.name={HERE}.{made}" for part, made in PARTS.items()]
    assert dry_run(*named, "loss_fn.kwargs={rows: 3}") == 0
    shown = capsys.readouterr().out
    for part, made in PARTS.items():
        assert f"{part} {HERE}.{made}" in shown


PARTS = {"loss_fn": "Loss", "grpo.adv_estimator": "Estimator", "grpo.rollout_source": "Source"}


def test_objects_without_an_attribute_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(f"grpo.adv_estimator.name={HERE}.EstimatorWithoutItsAttribute") == 2
    assert "lack the attributes needs_logprobs" in capsys.readouterr().err


def test_supervised_losses_are_checked_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run("loss_fn.name=no_such_module_of_mine.Loss", file=SFT, schema=SFTMasterConfig) == 2
    assert "loss_fn.name='no_such_module_of_mine.Loss' cannot be imported" in capsys.readouterr().err


def test_what_a_run_here_would_be_refused_for_is_shown_and_does_not_count(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    machine = ("cluster.device=cuda", "cluster.gpus_per_node=1", "cluster.gpu_memory_gb=80")
    assert dry_run(*machine, "policy.generation.backend=hf") == 0
    config, _, machine = capsys.readouterr().out.partition("This machine (not part of the verdict)\n")
    assert "Checks\n" in config and "  mesh " in config and "  parts " in config
    assert "  devices       a run here would be refused: cluster.device=cuda, but this machine has no GPU" in machine
    assert "  ray           it can start in" in machine and "  logs          logs go to" in machine


def test_every_check_has_its_place() -> None:
    """What a run checks first imports nothing large and is about the machine; names are those of findings."""
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert all(check.of_machine for check in CHECKS if check.moment is Moment.FIRST)
    assert all(check.of_machine for check in CHECKS if check.reads_data)
    of_doctor = {"cluster", "ray start"}
    assert {need for check in CHECKS for need in check.needs} <= {*names, *of_doctor}
    order = [check.moment.value for check in CHECKS]
    assert order == sorted(order)
