"""A supervised run with a model next to the policy: it is checked, started, saved, and given to the stages."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.algorithms import dpo, sft, start
from nemo_rl.algorithms.runtime.device_sharing import MemorySharing
from nemo_rl.algorithms.setup.roles import RankStarter
from nemo_rl.algorithms.supervised import LossValidator
from nemo_rl.config import REPOSITORY_ROOT, DPOMasterConfig, Role, SecondModelConfig, SFTMasterConfig, load_config
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.errors import ConfigError

CONFIGS = REPOSITORY_ROOT / "examples/configs"
TINY = "examples/assets/tiny-chat"


class WithCritic(SFTMasterConfig):
    """SFT with a second trained model."""

    critic: SecondModelConfig
    """A second model."""


def config_in(folder: Path, *overrides: str) -> WithCritic:
    small = ["data.train.num_samples=64", "sft.val_at_start=false", f"critic.model_name={TINY}"]
    folders = [f"logger.log_dir={folder}/logs", f"checkpointing.checkpoint_dir={folder}/results"]
    return load_config(CONFIGS / "sft_cpu.yaml", [*small, *folders, *overrides], schema=WithCritic)


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Play the parts of a start that need Ray."""
    monkeypatch.setattr(start, "init_ray", lambda *_, **options: None)
    monkeypatch.setattr(start, "reserve", lambda *_: None)
    parts = {"layout": SimpleNamespace(num_ranks=1), "worker_group": SimpleNamespace(start_phases=[])}
    monkeypatch.setattr(
        RankStarter, "start", lambda starter, name, *_: SimpleNamespace(name=name, shutdown=lambda: None, **parts)
    )


@pytest.mark.usefixtures("without_ray")
def test_stages_get_all_started_models(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    given: list[Mapping[str, Any]] = []

    def stages(models: Mapping[str, Any]) -> list[Any]:
        given.append(models)
        return []

    recipe = sft.recipe(config)
    assert list(recipe.roles) == ["policy", "critic"]
    with start.start_run(config, replace(recipe, stages=stages)) as run:
        assert list(run.roles) == ["policy", "critic"]
    assert [{name: model.name for name, model in models.items()} for models in given] == [
        {"policy": "policy", "critic": "critic"}
    ] * 2, "once for training, once for validation"


def test_a_model_that_a_program_adds_is_checked_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "init_ray", lambda *_, **options: pytest.fail("Ray was started"))
    config = config_in(tmp_path)
    added = config.critic.model_copy(deep=True)
    added.optimizer = None
    recipe = sft.recipe(config)
    with pytest.raises(ConfigError, match=r"judge\.optimizer is null"):
        start.start_run(config, replace(recipe, roles={**recipe.roles, "judge": Role(added)}))


def test_a_recipe_keeps_the_reference_that_its_loss_needs() -> None:
    for loss, keeps in (("sigmoid", True), ("simpo", False)):
        overrides = [f"dpo.preference_loss={loss}", "data.train.num_samples=64"]
        config = load_config(CONFIGS / "dpo_cpu.yaml", overrides, schema=DPOMasterConfig)
        recipe = dpo.recipe(config)
        assert recipe.roles["policy"].keeps_reference is keeps
        assert len(recipe.stages({"policy": None})) == keeps  # type: ignore[dict-item]


def test_a_validation_gives_each_stage_its_devices_and_then_the_policy() -> None:
    events: list[str] = []

    class Turn:
        def __init__(self, name: str) -> None:
            self.name = name

        def rest(self) -> None:
            events.append(f"{self.name} rests")

        def wake(self) -> None:
            events.append(f"{self.name} wakes")

    stage: Any = SimpleNamespace(name="scores", roles=("critic",), apply=lambda batch: events.append("stage"))
    policy: Any = SimpleNamespace(train=lambda *_, **options: events.append("loss") or {"metrics": {"loss": [1.0]}})
    memory = MemorySharing({name: Turn(name) for name in ("policy", "critic")})
    loss_fn: Any = SimpleNamespace()
    batch: BatchedDataDict[Any] = BatchedDataDict(rows=[1])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("nemo_rl.algorithms.supervised.join_updates", lambda *_: {"loss": 1.0})
        assert LossValidator([batch], [stage], policy, memory, loss_fn)(1) == {"loss": 1.0}
    assert events == ["policy rests", "critic wakes", "stage", "critic rests", "policy wakes", "loss"]
