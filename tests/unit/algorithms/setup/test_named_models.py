"""A run with more models than the policy: every check and every plan counts each of them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import yaml
from pydantic import Field

from nemo_rl.algorithms.runtime.device_sharing import MemorySharing, SavedOnDevice, groups_of_models, saved_models
from nemo_rl.algorithms.runtime.resume_check import check_resume
from nemo_rl.algorithms.setup import roles, run_folders
from nemo_rl.algorithms.setup.preflight import check_added_models
from nemo_rl.algorithms.setup.roles import place_models
from nemo_rl.algorithms.setup.run_folders import check_space, checkpoint_sizes
from nemo_rl.commands.dry_run import describe
from nemo_rl.config import (
    REPOSITORY_ROOT,
    GRPOMasterConfig,
    Role,
    SecondModelConfig,
    divide_cluster,
    load_config,
    model_ranks,
    sharing,
    trained,
)
from nemo_rl.config.rules.resume import changed_keys
from nemo_rl.utils.errors import CheckpointError, ConfigError

CONFIG = REPOSITORY_ROOT / "examples/configs/grpo_math_cpu.yaml"
TINY = "examples/assets/tiny-chat"
GPUS = ("cluster.device=cuda", "cluster.gpus_per_node=8", "policy.precision=bfloat16")


class FrozenModelConfig(SecondModelConfig):
    """A model that only answers."""

    trains: ClassVar[bool] = False


class ThreeModels(GRPOMasterConfig):
    """GRPO with a trained critic and a frozen judge."""

    critic: SecondModelConfig = Field(description="Trained.")
    judge: FrozenModelConfig = Field(description="Frozen.")


def three(*overrides: str, check: bool = True) -> ThreeModels:
    models = [f"{name}.model_name={TINY}" for name in ("critic", "judge")]
    return load_config(CONFIG, [*models, *overrides], schema=ThreeModels, check=check)


def test_models_are_the_sections_that_describe_one() -> None:
    config = three("critic.train_micro_batch_size=4")
    assert list(config.models) == ["policy", "critic", "judge"]
    assert list(trained(config.models)) == ["policy", "critic"]
    assert config.critic.max_total_sequence_length == config.policy.max_total_sequence_length
    assert (config.critic.train_global_batch_size, config.critic.train_micro_batch_size) == (64, 4)
    assert sharing(config.models) == {"policy": ["policy", "critic", "judge"]}


def test_each_model_gets_its_own_ranks_or_those_it_shares() -> None:
    """Four GPUs for the critic, which the judge shares; two of the other four are for engines."""
    config = three(
        *GPUS,
        "critic.colocated.enabled=false",
        "critic.colocated.resources.gpus_per_node=4",
        "judge.colocated.with_model=critic",
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.gpus_per_node=2",
    )
    parts = divide_cluster(config.cluster, config.models)
    assert {name: part.gpus_per_node for name, part in parts.items()} == {"policy": 4, "critic": 4, "judge": 4}
    assert model_ranks(config.cluster, config.models) == {"policy": 2, "critic": 4, "judge": 4}
    assert sharing(config.models) == {"policy": ["policy"], "critic": ["critic", "judge"]}


def test_two_models_with_their_own_devices_leave_the_rest_to_the_policy() -> None:
    own = [f"{name}.colocated.{key}" for name in ("critic", "judge") for key in ("enabled=false",)]
    config = three(*GPUS, *own, *(f"{name}.colocated.resources.gpus_per_node=2" for name in ("critic", "judge")))
    assert model_ranks(config.cluster, config.models) == {"policy": 4, "critic": 2, "judge": 2}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["critic.colocated.with_model=jugde"], r"with_model=jugde is no other model of the run\..* policy, judge"),
        (["critic.colocated.with_model=judge"], r"judge uses the devices of policy\. Set critic\.colocated\.with_m"),
        ([*GPUS, "judge.colocated.enabled=false"], r"needs judge\.colocated\.resources\.gpus_per_node"),
        (
            [
                *GPUS,
                *(f"{name}.colocated.enabled=false" for name in ("critic", "judge")),
                *(f"{name}.colocated.resources.gpus_per_node=4" for name in ("critic", "judge")),
            ],
            "leaves no device for the policy",
        ),
        (["critic.optimizer=null"], r"critic\.optimizer is null, but the critic is trained"),
        (["critic.max_total_sequence_length=8"], r"critic\.max_total_sequence_length=8 is less than"),
        (["critic.megatron_cfg.enabled=true"], r"critic\.megatron_cfg\.enabled=true name two training backends"),
        (["critic.model_name=./nowhere"], r"critic\.model_name='\./nowhere' does not exist"),
        (
            ["cluster.ranks_per_node=2", "critic.train_global_batch_size=3"],
            r"critic\.train_global_batch_size=3 does not divide into 2 data-parallel ranks",
        ),
    ],
)
def test_a_wrong_section_of_a_further_model_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        three(*overrides)


def test_a_frozen_model_needs_no_optimizer() -> None:
    assert three("judge.optimizer=null").judge.optimizer is None


def test_models_that_share_devices_get_the_same_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []

    def reserve(cluster: Any, name: str, nodes: int, per_node: int, groups: int, apart: Any = ()) -> Any:
        made.append((name, nodes, per_node, groups))
        return name

    monkeypatch.setattr(roles, "_reserve", reserve)
    config = three(
        *GPUS,
        "critic.colocated.enabled=false",
        "critic.colocated.resources.gpus_per_node=4",
        "judge.colocated.with_model=critic",
    )
    shared = "policy_and_generation"
    places = place_models(config.cluster, config.models)
    assert places == {"policy": shared, "critic": "critic", "judge": "critic", "generation": shared}
    assert made == [("critic", 1, 4, 2), (shared, 1, 4, 2)]
    made.clear()
    together = three(*GPUS)
    assert set(place_models(together.cluster, together.models).values()) == {shared}
    assert made == [(shared, 1, 8, 4)]


def test_the_dry_run_shows_every_model_and_its_memory() -> None:
    config = three(*GPUS, "cluster.gpu_memory_gb=80", "policy.generation.max_new_tokens=8")
    shown = describe(config)
    (name,) = shown.forecast.groups
    assert name == "policy + critic + judge + generation"
    phases = shown.forecast.groups[name].moments
    of_models = {"training", "critic's training", "critic's scores", "judge's scores"}
    assert phases.keys() >= of_models | {"generation", "weight sync"}
    assert phases["critic's training"]["critic's optimizer state"] > 0 and phases["critic's training"]["weights"] > 0
    assert not any(kind.startswith(("critic", "judge")) for kind in phases["training"] | phases["generation"])
    assert shown.forecast.groups[name].host["critic's optimizer state"] > 0
    for model in ("policy", "critic", "judge"):
        assert f"  {model:<14}" in shown.text
    sizes = checkpoint_sizes(config.models, config.checkpointing)
    assert sizes is not None and sizes.keys() == {"policy", "critic"} and shown.checkpoint == sum(sizes.values())

    apart = describe(
        three(*GPUS, "critic.colocated.enabled=false", "critic.colocated.resources.gpus_per_node=4")
    ).forecast.groups
    assert list(apart) == ["policy + judge + generation", "critic"]
    assert list(apart["critic"].moments) == ["critic's training", "critic's scores"]


def test_passes_that_score_have_their_own_microbatches_and_keep_the_optimizer_unless_it_is_offloaded() -> None:
    """Of 8192 tokens where an update has 128: they need the most memory, and the state of the critic is known still."""
    packed = ["critic.sequence_packing.train_mb_tokens=128", "critic.sequence_packing.logprob_mb_tokens=8192"]
    packing = ["critic.sequence_packing.enabled=true", *packed]
    (whole,), (offloaded,) = (
        describe(three(*GPUS, *packing, f"critic.offload_optimizer_for_logprob={value}")).forecast.groups.values()
        for value in ("false", "true")
    )
    update, scores = whole.moments["critic's training"], whole.moments["critic's scores"]
    assert scores["critic's activations"] > update["critic's activations"] and "critic's gradients" not in scores
    state = "critic's optimizer state"
    assert scores[state] == update[state] == whole.host[state] == offloaded.host[state] > 0
    assert offloaded.moments["critic's scores"] == {kind: size for kind, size in scores.items() if kind != state}


def test_weights_that_cannot_be_offloaded_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_rl.models.dtensor.training_backend import DTensorTraining

    monkeypatch.setattr(DTensorTraining, "offloads_trained_weights", False)
    (group,) = describe(three(*GPUS)).forecast.groups.values()
    size = group.moments["critic's training"]["critic's weights"]
    assert all(
        group.moments[phase]["critic's weights"] == size
        for phase in ("training", "judge's scores", "generation", "weight sync")
    )
    models: Any = dict.fromkeys(("policy", "critic", "judge"))
    users = groups_of_models(three(*GPUS).models, models)["policy"]
    assert [type(user).__name__ for user in users.values()] == ["TrainedModel", "TrainedModel", "FrozenModel"]


def test_a_disk_without_room_for_all_models_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = three("checkpointing.enabled=true", f"checkpointing.checkpoint_dir={tmp_path}")
    sizes = checkpoint_sizes(config.models, config.checkpointing)
    assert sizes is not None
    checkpoints: Any = SimpleNamespace(expected_bytes=None, steps=list)
    monkeypatch.setattr(run_folders, "free_bytes", lambda _: sum(sizes.values()) - 1)
    check_space(config.checkpointing, {"policy": config.models["policy"]}, checkpoints, None)
    with pytest.raises(CheckpointError, match="no space for a checkpoint"):
        check_space(config.checkpointing, config.models, checkpoints, None)
    assert checkpoints.expected_bytes == sum(sizes.values())


def write_step(folder: Path, config: GRPOMasterConfig, names: tuple[str, ...]) -> Path:
    """A step folder as a run with these trained models leaves it, without weights."""
    import torch

    path = folder / "step_1"
    for name in names:
        (path / name / "optimizer").mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    torch.save({"loader": {"num_rows": 5}}, path / "train_dataloader.pt")
    return path


def test_a_resumed_run_needs_every_trained_model_in_the_checkpoint(tmp_path: Path) -> None:
    config = three()
    check_resume(config, config.models, write_step(tmp_path / "both", config, ("policy", "critic")), 5, "")
    alone = write_step(tmp_path / "alone", config, ("policy",))
    with pytest.raises(ConfigError, match=r"(?s)no folder critic: .*allow_changed=\[critic\]"):
        check_resume(config, config.models, alone, 5, "")
    accepted = three("checkpointing.allow_changed=[critic]")
    check_resume(accepted, accepted.models, alone, 5, "")
    megatron = three("critic.dtensor_cfg.enabled=false", "critic.megatron_cfg.enabled=true", check=False)
    both = tmp_path / "both/step_1"
    with pytest.raises(ConfigError, match=r"written by critic\.dtensor_cfg, and this run trains by critic\.megatron"):
        check_resume(megatron, megatron.models, both, 5, "")


def test_keys_of_every_model_may_change_where_those_of_the_policy_may() -> None:
    before = three().model_dump(mode="json")
    keys = ("critic.train_micro_batch_size=2", "critic.logprob_batch_size=2", "judge.model_name=elsewhere")
    changed = three(*keys, check=False)
    found = {change.key: change.is_applied for change in changed_keys(changed, before)}
    assert found["critic.train_micro_batch_size"] and not found["judge.model_name"]


def test_a_model_that_a_program_adds_is_checked_too() -> None:
    config = load_config(CONFIG, schema=GRPOMasterConfig)
    added = config.policy.model_copy(deep=True)
    models = config.models | {"critic": Role(added)}
    check_added_models(config, models)
    added.optimizer = None
    with pytest.raises(ConfigError, match=r"critic\.optimizer is null"):
        check_added_models(config, models)


def test_groups_of_devices_take_turns_by_themselves() -> None:
    events: list[str] = []

    class Turn:
        def __init__(self, name: str) -> None:
            self.name = name

        def rest(self) -> None:
            events.append(f"{self.name} rests")

        def wake(self) -> None:
            events.append(f"{self.name} wakes")

    memory = MemorySharing(*({name: Turn(name) for name in names} for names in (("policy", "a"), ("critic", "judge"))))
    memory.hand_to(("policy",))
    memory.hand_to(("critic",))
    memory.hand_to(("judge",))
    memory.hand_to(("policy", "judge"))
    assert events == ["a rests", "policy wakes", "judge rests", "critic wakes", "critic rests", "judge wakes"]


def test_a_second_model_has_its_devices_while_it_is_saved() -> None:
    events: list[str] = []
    memory: Any = SimpleNamespace(hand_to=lambda names: events.append(f"devices to {', '.join(names)}"))
    model: Any = SimpleNamespace(save_checkpoint=lambda *paths, **options: events.append(f"save {paths} {options}"))
    saved = saved_models(three().models, {"policy": model, "critic": model, "judge": model}, memory)
    assert saved["policy"] is model and isinstance(saved["critic"], SavedOnDevice) and "judge" not in saved
    saved["critic"].save_checkpoint("weights", None, "tokenizer", False, background=True)
    assert events == ["devices to critic", "save ('weights', None, 'tokenizer', False) {'background': True}"]
