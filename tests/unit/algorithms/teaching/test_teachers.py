"""The teachers of a GRPO or distillation run: their sections, the rows that each scores, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TinyShape, make_char_tokenizer, make_tiny_model, save_tiny_checkpoint

from nemo_rl.algorithms import distillation, grpo
from nemo_rl.algorithms.rollout.environments import response_data
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.algorithms.teaching.stages import teacher_stages
from nemo_rl.algorithms.teaching.teachers import TeacherLogprobs, TeacherRoutes, TeacherScores
from nemo_rl.config import DistillationMasterConfig, GRPOMasterConfig, load_config
from nemo_rl.config.runs.dependent_keys import fill_dependent_keys
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.utils.errors import ConfigError, DataError

CONFIGS = Path(__file__).resolve().parents[4] / "examples/configs"
TEACHER, STUDENT = "examples/assets/tiny-teacher", "examples/assets/tiny-chat"
TWO = f"on_policy_distillation.teacher_model_by_agent_name={{math: {TEACHER}, code: {STUDENT}}}"


def config_of(*overrides: str) -> GRPOMasterConfig:
    on = ("grpo.adv_estimator.name=opd", "on_policy_distillation.enabled=true")
    return load_config(CONFIGS / "grpo_math_cpu.yaml", [*on, *overrides])


class Constant:
    """A model whose log-probabilities are all equal."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.seen: list[list[int]] = []

    def get_logprobs(self, rows: BatchedDataDict[Any]) -> dict[str, torch.Tensor]:
        self.seen.append(rows["input_ids"][:, 0].tolist())
        return {"logprobs": torch.full(rows["input_ids"].shape, self.value)}

    def get_topk_logits(self, rows, k, *, vocab_size=None) -> dict[str, torch.Tensor]:
        shape = (*rows["input_ids"].shape, k)
        return {
            "topk_logits": torch.full(shape, self.value),
            "topk_indices": torch.full(shape, int(self.value), dtype=torch.int64),
        }


def batch_of(*environments: str, **info: Any) -> StepBatch:
    rows = [Trajectory(i, 0, i, name, [], 1, reward=1.0) for i, name in enumerate(environments)]
    for row in rows:
        row.extra_env_info = info
    size = len(rows)
    tensors = {
        "input_ids": torch.arange(size)[:, None].repeat(1, 3),
        "input_lengths": torch.full((size,), 3),
        "token_mask": torch.tensor([[0.0, 1, 1]]).repeat(size, 1),
        "sample_mask": torch.ones(size),
        "prev_logprobs": torch.full((size, 3), -1.0),
    }
    return StepBatch(BatchedDataDict(tensors), rows)


def test_each_row_is_scored_by_the_teacher_of_its_environment() -> None:
    config = config_of(TWO)
    models = {"teachers.math": Constant(-2.0), "teachers.code": Constant(-5.0)}
    tokenizer = get_tokenizer(config.policy.tokenizer)
    stages = teacher_stages(config, response_data(tokenizer, config), tokenizer)(models)
    assert [stage.roles for stage in stages] == [("teachers.math",), ("teachers.code",)]
    batch = batch_of("code", "math", "code")
    metrics = {name: value for stage in stages for name, value in stage.apply(batch).items()}
    assert batch.tensors["teacher_logprobs"].tolist() == [[-5.0] * 3, [-2.0] * 3, [-5.0] * 3]
    assert (models["teachers.math"].seen, models["teachers.code"].seen) == ([[1]], [[0, 2]])
    assert metrics == {
        "teachers.math/num_rows": 1.0,
        "teachers.math/reverse_kl": 1.0,
        "teachers.code/num_rows": 2.0,
        "teachers.code/reverse_kl": 4.0,
    }


def test_a_teacher_without_rows_is_not_asked() -> None:
    model = Constant(-2.0)
    stage = TeacherLogprobs(model, "teachers.math", TeacherRoutes({"math": "teachers.math", "code": "teachers.code"}))
    assert stage.apply(batch_of("code")) == {"teachers.math/num_rows": 0.0}
    assert not model.seen


def test_an_agent_of_nemo_gym_comes_before_the_environment() -> None:
    routes = TeacherRoutes({"solver": "teachers.solver", "nemo_gym": "teachers.other"})
    (row,) = batch_of("nemo_gym", row={"agent_ref": {"name": "solver"}}).trajectories
    assert routes.teacher_of(row) == "teachers.solver"


def test_names_without_a_teacher_have_the_default_or_are_refused() -> None:
    (row,) = batch_of("chess").trajectories
    default = config_of(TWO, "on_policy_distillation.default_teacher_alias=code")
    routes = TeacherRoutes.of(default.on_policy_distillation, default.teachers)
    assert routes.teacher_of(row) == "teachers.code"
    strict = config_of(
        TWO,
        "on_policy_distillation.default_teacher_alias=code",
        "on_policy_distillation.strict_agent_name_match=true",
    )
    for config in (config_of(TWO), strict):
        with pytest.raises(DataError, match=r"'chess' has no teacher; there are teachers for 'code', 'math'"):
            TeacherRoutes.of(config.on_policy_distillation, config.teachers).teacher_of(row)


def test_a_model_with_several_names_is_loaded_once() -> None:
    same = f"on_policy_distillation.teacher_model_by_agent_name={{math: {TEACHER}, code: {TEACHER}}}"
    config = config_of(same)
    assert list(config.models) == ["policy", "teachers.math"]
    routes = TeacherRoutes.of(config.on_policy_distillation, config.teachers)
    assert routes.roles == {"math": "teachers.math", "code": "teachers.math"}
    twice = config_of(same, "on_policy_distillation.deduplicate_shared_teacher_checkpoints=false")
    assert list(twice.models) == ["policy", "teachers.math", "teachers.code"]


def test_a_teacher_computes_as_the_policy_does() -> None:
    config = config_of(
        TWO,
        "policy.generation.temperature=0.7",
        "policy.logprob_batch_size=3",
        "policy.dtensor_cfg.lora_cfg.enabled=true",
    )
    teacher = config.teachers["math"]
    assert (teacher.logprob_batch_size, teacher.precision) == (3, "float32")
    assert teacher.generation is not None and teacher.generation.temperature == 0.7
    assert (teacher.optimizer, teacher.adapter_keys, teacher.trains) == (None, [], False)
    assert teacher.tokenizer.name.endswith("tiny-teacher")
    before = config.model_dump()
    fill_dependent_keys(config)
    assert config.model_dump() == before


def test_teachers_on_devices_of_their_own_have_their_own_layout() -> None:
    config = config_of(
        TWO,
        "cluster.device=cuda",
        "cluster.gpus_per_node=8",
        "policy.dtensor_cfg.tensor_parallel_size=2",
        "on_policy_distillation.non_colocated_teachers.enabled=true",
        "on_policy_distillation.non_colocated_teachers.default_teacher_cfg={gpus_per_node: 2, micro_batch_size: 7}",
        "on_policy_distillation.non_colocated_teachers.teacher_overrides={code: {tensor_model_parallel_size: 2, "
        "precision: bf16}}",
    )
    math, code = config.teachers["math"], config.teachers["code"]
    assert [each.placement.resources.gpus_per_node for each in (math, code)] == [2, 2]
    assert [each.dtensor_cfg.tensor_parallel_size for each in (math, code)] == [1, 2]
    assert [each.precision for each in (math, code)] == ["float32", "bfloat16"]
    assert [each.logprob_batch_size for each in (math, code)] == [7, 7]
    assert config.policy_cluster.gpus_per_node == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "needs teachers"),
        (("grpo.adv_estimator.name=grpo", TWO), "whose scores grpo.adv_estimator.name=grpo does not use"),
        (("on_policy_distillation.enabled=false", TWO), "enabled=false, but .*teacher_model_by_agent_name is set"),
        ((TWO, "on_policy_distillation.default_teacher_alias=mth"), r"names 'mth'.*Did you mean 'math'"),
        (
            (TWO, "on_policy_distillation.non_colocated_teachers.teacher_overrides={cod: {}}"),
            "teacher_overrides names 'cod'",
        ),
        ((TWO, "policy.generation.top_p=0.9"), "over the whole vocabulary"),
        ((TWO, "grpo.use_dynamic_sampling=true"), "trains without rewards"),
        ((TWO, "cluster.rollout_runners=1"), "keeps tokens out of the driver"),
        (
            (f"on_policy_distillation.teacher_model_by_agent_name={{code: {TEACHER}}}",),
            "no teacher for env_name=math of the data; there are teachers for code",
        ),
        (
            (TWO, "loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"),
            "only the mean of its advantages would count, but grpo.adv_estimator.name=opd gives tokens their own",
        ),
        (("teachers.math={model_name: x, reward_model_cfg: {enabled: true}}",), "scores whole answers"),
        ((f"on_policy_distillation.teacher_model_by_agent_name={{math: {TEACHER}-x}}",), "teachers.math.model_name"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides, message) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(*overrides)


def test_a_teacher_with_another_vocabulary_is_refused_before_ray_starts(tmp_path, monkeypatch) -> None:
    tokenizer = make_char_tokenizer()
    tokenizer.add_tokens(["carry"])
    shape = TinyShape(vocab_size=272, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1)
    save_tiny_checkpoint(tmp_path / "other", make_tiny_model(shape=shape), tokenizer)
    monkeypatch.setattr(grpo, "start_run", lambda *_: pytest.fail("the run was started"))
    with pytest.raises(ConfigError, match=r"teachers\.math\.model_name=.* has another vocabulary"):
        grpo.setup(config_of(f"on_policy_distillation.teacher_model_by_agent_name={{math: {tmp_path}/other}}"))


def test_distillation_has_a_teacher_for_each_environment(monkeypatch) -> None:
    monkeypatch.setattr(distillation, "start_run", lambda config, recipe, started_at: recipe)
    config = load_config(
        CONFIGS / "distillation_math_cpu.yaml",
        [f"teachers.code={{model_name: {TEACHER}}}", "distillation.topk_logits_k=2"],
        schema=DistillationMasterConfig,
    )
    recipe = distillation.setup(config)
    assert {name: role.trains for name, role in recipe.roles.items()} == {
        "policy": True,
        "teacher": False,
        "teachers.code": False,
    }
    stages = recipe.stages({"teacher": Constant(1.0), "teachers.code": Constant(2.0)})
    assert all(isinstance(stage, TeacherScores) for stage in stages)
    batch = batch_of("math", "code", "math")
    for stage in stages:
        stage.apply(batch)
    assert batch.tensors["teacher_topk_logits"][:, 0, 0].tolist() == [1.0, 2.0, 1.0]
    assert batch.tensors["teacher_topk_indices"][:, 2, 1].tolist() == [1, 2, 1]
