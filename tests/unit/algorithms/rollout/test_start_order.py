"""In which order engines and models of a run that samples start; workers are played by parts that write it down."""

import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.algorithms import start
from nemo_rl.algorithms.recipe import Recipe
from nemo_rl.algorithms.setup import roles
from nemo_rl.algorithms.setup.start_budget import StartBudget
from nemo_rl.config import REPOSITORY_ROOT, GRPOMasterConfig, Role, load_config
from nemo_rl.models.generation.interfaces import EngineSettings

CONFIG = Path("examples/configs/grpo_math_cpu.yaml")
SHARED_GPUS = ["cluster.device=cuda", "cluster.gpus_per_node=2"]
OWN_GPUS = [
    *SHARED_GPUS,
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
]


_MOVES = ("offload_optimizer", "offload_weights")


class Parts:
    """The workers of a run: what they do is written to `events`; `wait_for_each_other` needs all of them at once."""

    def __init__(self, wait_for_each_other: int = 1):
        self.events: list[str] = []
        self._together = threading.Barrier(wait_for_each_other, timeout=10)

    def make_engines(self, settings: EngineSettings, where: Any, *_: Any, **options: Any) -> Any:
        return self._started("engines")

    def start_ranks(self, name: str) -> Any:
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
                start_phases=[],
            ),
            worker_group=SimpleNamespace(start_phases=[]),
            **{move: lambda move=move: self.events.append(f"{name} {move}") for move in _MOVES},
            call_all=lambda method: self.events.append(f"{name} {method}"),
            with_replacements=lambda work: work(),
        )


def start_workers(monkeypatch: pytest.MonkeyPatch, parts: Parts, overrides: list[str]) -> list[str]:
    """What happens while the workers start."""
    config = load_config(CONFIG, overrides, schema=GRPOMasterConfig)
    monkeypatch.setattr(start, "make_engines", parts.make_engines)
    monkeypatch.setattr(roles.RankStarter, "start", lambda starter, name, *_: parts.start_ranks(name))
    monkeypatch.setattr(start, "init_ray", lambda _, **options: None)
    monkeypatch.setattr(start, "reserve", lambda *_: None)
    data: Any = SimpleNamespace(task_env={}, train=SimpleNamespace(parts=[]))
    models = {
        "policy": Role(config.policy),
        "critic": Role(config.policy),
        "teacher": Role(config.policy, trains=False),
    }
    recipe = Recipe(tokenizer=None, data=data, loss_fn=None, roles=models)  # type: ignore[arg-type]
    folders: Any = SimpleNamespace(log_dir=Path("logs"), resume_path=None)
    with ExitStack() as resources:
        plan, budget = start.RunPlan(config, recipe, folders, metrics=None, num_steps=1), StartBudget(0.0)  # type: ignore[arg-type]
        workers = start.start_workers(plan, start.start_machines(plan, resources, budget), resources, budget)
        assert list(workers.models) == ["policy", "critic", "teacher"]
        happened = list(parts.events)
    ends = parts.events[len(happened) :]
    assert sorted(ends) == ["critic end", "engines end", "policy end", "teacher end"]
    return happened


IN_TURNS = [
    *("teacher start", "teacher up", "teacher offload_weights", "critic start", "critic up"),
    *("critic offload_optimizer", "critic offload_weights", "teacher offload_weights", "policy start", "policy up"),
]
"""On shared GPUs each model leaves the devices before the next starts; leaving twice has no effect."""


def test_on_shared_gpus_engines_and_models_start_one_after_another(monkeypatch):
    events = start_workers(monkeypatch, Parts(), SHARED_GPUS)
    assert events == ["engines start", "engines up", "engines sleep", *IN_TURNS]


def test_engines_with_gpus_of_their_own_start_at_the_same_time_as_models(monkeypatch):
    events = start_workers(monkeypatch, Parts(), OWN_GPUS)
    assert [event for event in events if "engines" not in event] == IN_TURNS
    assert events.index("engines up") < events.index("critic start")


def test_on_cpus_engines_and_models_start_at_the_same_time(monkeypatch):
    """Each waits for the others in the middle of its start."""
    events = start_workers(monkeypatch, Parts(wait_for_each_other=4), [])
    assert sorted(events[:4]) == ["critic start", "engines start", "policy start", "teacher start"]
    assert not [event for event in events if event.split()[-1] in ("sleep", *_MOVES)]


@pytest.mark.parametrize("lost", [["policy"], ["teacher"]])
def test_ranks_are_replaced_one_after_another_too(tmp_path: Path, lost: list[str]) -> None:
    """Old ranks end first; trained models load the checkpoint; a frozen one that lost no rank leaves its devices."""
    config = load_config(CONFIG, SHARED_GPUS, schema=GRPOMasterConfig)
    frozen = Role(config.policy, trains=False)
    models = {"policy": Role(config.policy), "critic": Role(config.policy), "teacher": frozen}
    for name in ("policy", "critic"):
        (tmp_path / name / "optimizer").mkdir(parents=True)
    events: list[str] = []

    def ranks(name: str) -> Any:
        def restart(*paths: Path | None) -> None:
            events.append(f"{name} restart {[path.name for path in paths if path]}")

        moves = {move: lambda move=move: events.append(f"{name} {move}") for move in _MOVES}
        group = SimpleNamespace(end=lambda cause: events.append(f"{name} ends"))
        return SimpleNamespace(restart=restart, worker_group=group, **moves)

    roles.replace_ranks(config.cluster, models, {name: ranks(name) for name in models}, lost, tmp_path)
    restarts = [event for event in events if "restart" in event]
    replaced = {"policy", "critic", *lost}
    assert set(events[: len(replaced)]) == {f"{name} ends" for name in replaced}
    of_trained = [f"{name} restart ['weights', 'optimizer']" for name in ("critic", "policy")]
    assert restarts == ["teacher restart []"] * (lost == ["teacher"]) + of_trained
    before, after = (events[: events.index(of_trained[0])], events[events.index(of_trained[0]) : -1])
    assert before[-1] == "teacher offload_weights"
    assert after[1:3] == ["critic offload_optimizer", "critic offload_weights"]
    assert events[-1] == of_trained[1]


def test_other_machines_are_asked_for_absolute_folders(monkeypatch, tmp_path):
    """Their processes have working directories of their own."""
    asked: list[Any] = []
    monkeypatch.setattr(roles, "check_nodes", lambda _, shared: asked.append(shared))
    monkeypatch.chdir(tmp_path)
    saving = ["checkpointing.enabled=true", "checkpointing.checkpoint_dir=results/mine"]
    with ExitStack() as resources:
        config = load_config(CONFIG, saving, schema=GRPOMasterConfig)
        roles.reserve([], config.checkpointing, config.models, resources)
    assert [shared.written for shared in asked] == [("checkpointing.checkpoint_dir", str(tmp_path / "results/mine"))]
    assert asked[0].folders["policy.model_name"] == str(REPOSITORY_ROOT / "examples/assets/tiny-chat")


@pytest.mark.parametrize(
    ("overrides", "of_engines"), [(SHARED_GPUS, ["engines reopen", "engines sleep"]), ([], ["engines reopen"])]
)
def test_ranks_are_replaced_without_threads_and_with_working_engines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, overrides: list[str], of_engines: list[str]
) -> None:
    events: list[str] = []
    config = load_config(CONFIG, overrides, schema=GRPOMasterConfig)
    recipe = Recipe(tokenizer=None, data=None, loss_fn=None, roles=config.models)  # type: ignore[arg-type]
    plan = start.RunPlan(config, recipe, folders=None, metrics=None, num_steps=1)  # type: ignore[arg-type]
    engines: Any = SimpleNamespace(
        reopen=lambda: events.append("engines reopen"),
        with_replacements=lambda work: work(),
        workers=SimpleNamespace(get_all_worker_results=lambda *_: []),
        call_all=lambda method: events.append(f"engines {method}"),
    )
    monkeypatch.setattr(start, "replace_ranks", lambda *given: events.append(f"replace {given[-2:]}"))
    threads = ExitStack()
    threads.callback(events.append, "threads end")
    parts = start.RunParts(plan, start.RunWorkers({}, engines, {}), threads)
    parts.replace_ranks(["policy"], tmp_path)
    assert events == ["threads end", *of_engines, f"replace {(['policy'], tmp_path)}"]
