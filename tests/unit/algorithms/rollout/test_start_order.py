"""In which order engines and models of a run that samples start; workers are played by parts that write it down."""

import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.algorithms.rollout import start
from nemo_rl.algorithms.setup import roles
from nemo_rl.config import REPOSITORY_ROOT, GRPOMasterConfig, Role, load_config
from nemo_rl.models.generation.interfaces import EngineSettings

CONFIG = Path("examples/configs/grpo_math_cpu.yaml")
SHARED_GPUS = ["cluster.device=cuda", "cluster.gpus_per_node=2"]
OWN_GPUS = [
    *SHARED_GPUS,
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
]


class Parts:
    """The workers of a run: what they do is written to `events`; `wait_for_each_other` needs all of them at once."""

    def __init__(self, wait_for_each_other: int = 1):
        self.events: list[str] = []
        self._together = threading.Barrier(wait_for_each_other, timeout=10)

    def make_engines(self, settings: EngineSettings, where: Any, *_: Any) -> Any:
        return self._started("engines")

    def start_role(self, name: str, *_: Any) -> Any:
        return self._started(name)

    def _started(self, name: str) -> Any:
        self.events.append(f"{name} start")
        self._together.wait()
        self.events.append(f"{name} up")
        return SimpleNamespace(
            shutdown=lambda: self.events.append(f"{name} end"),
            workers=SimpleNamespace(
                run_all_workers_single_data=lambda method: self.events.append(f"{name} {method}"),
                get_all_worker_results=lambda *_: [],
            ),
            call_all=lambda method: self.events.append(f"{name} {method}"),
            with_replacements=lambda work: work(),
        )


def start_workers(monkeypatch: pytest.MonkeyPatch, parts: Parts, overrides: list[str]) -> list[str]:
    """What happens while the workers start."""
    config = load_config(CONFIG, overrides, schema=GRPOMasterConfig)
    for name in ("make_engines", "start_role"):
        monkeypatch.setattr(start, name, getattr(parts, name))
    monkeypatch.setattr(start, "init_ray", lambda _, **options: None)
    monkeypatch.setattr(start, "reserve", lambda *_: None)
    recipe: Any = SimpleNamespace(
        data=SimpleNamespace(task_env={}),
        tokenizer=None,
        environments={},
        roles={"policy": Role(config.policy), "teacher": Role(config.policy, trains=False)},
    )
    folders: Any = SimpleNamespace(log_dir=Path("logs"), resume_path=None)
    with ExitStack() as resources:
        workers = start._start_workers(config, recipe, folders, resources)
        assert list(workers.models) == ["policy", "teacher"]
        happened = list(parts.events)
    ends = parts.events[len(happened) :]
    assert sorted(ends) == ["engines end", "policy end", "teacher end"]
    return happened


def test_on_shared_gpus_engines_start_alone_and_sleep_before_a_model_starts(monkeypatch):
    events = start_workers(monkeypatch, Parts(), SHARED_GPUS)
    assert events[:3] == ["engines start", "engines up", "engines sleep"]
    assert sorted(events[3:]) == ["policy start", "policy up", "teacher start", "teacher up"]


@pytest.mark.parametrize("overrides", [[], OWN_GPUS], ids=["cpu", "devices of their own"])
def test_elsewhere_engines_and_models_start_at_the_same_time(monkeypatch, overrides):
    """Each waits for the others in the middle of its start."""
    events = start_workers(monkeypatch, Parts(wait_for_each_other=3), overrides)
    assert sorted(events[:3]) == ["engines start", "policy start", "teacher start"]
    assert "engines sleep" not in events


def test_other_machines_are_asked_for_absolute_folders(monkeypatch, tmp_path):
    """Their processes have working directories of their own."""
    asked: list[Any] = []
    monkeypatch.setattr(roles, "check_nodes", lambda _, shared: asked.append(shared))
    monkeypatch.chdir(tmp_path)
    saving = ["checkpointing.enabled=true", "checkpointing.checkpoint_dir=results/mine"]
    with ExitStack() as resources:
        config = load_config(CONFIG, saving, schema=GRPOMasterConfig)
        roles.reserve([], config, config.models, resources)
    assert [shared.written for shared in asked] == [("checkpointing.checkpoint_dir", str(tmp_path / "results/mine"))]
    assert asked[0].folders["policy.model_name"] == str(REPOSITORY_ROOT / "examples/assets/tiny-chat")
