"""The distillation configuration: the teacher follows the policy where it should, and rules between keys hold."""

from pathlib import Path

import pytest

from nemo_rl.config import (
    REPOSITORY_ROOT,
    ClusterConfig,
    DistillationMasterConfig,
    PlacementConfig,
    divide_cluster,
    load_config,
    plan_topology,
)
from nemo_rl.utils.errors import ConfigError

CONFIGS = REPOSITORY_ROOT / "examples/configs"
CUDA = ("cluster.device=cuda", "cluster.gpus_per_node=8")
APART = "teacher.colocated.enabled=false"


def load(name: str, *overrides: str) -> DistillationMasterConfig:
    return load_config(CONFIGS / name, overrides, schema=DistillationMasterConfig)


def test_distillation_defaults_are_those_of_nemo_rl() -> None:
    config = load("distillation_math.yaml")
    wanted = {
        "max_num_epochs": 10,
        "max_num_steps": 1000,
        "max_rollout_turns": 1,
        "max_val_samples": 512,
        "num_generations_per_prompt": 1,
        "num_prompts_per_step": 128,
        "seed": 42,
        "topk_logits_k": 64,
        "val_at_end": False,
        "val_at_start": False,
        "val_batch_size": 64,
        "val_period": 20,
    }
    section = type(config.distillation)()
    for key, value in wanted.items():
        assert getattr(config.distillation, key) == getattr(section, key) == value, key
    loss = type(config.loss_fn)()
    assert loss == config.loss_fn
    assert (loss.kl_type, loss.mixed_kl_weight, loss.zero_outside_topk) == ("mixed", 0.5, False)


def test_the_teacher_follows_the_policy_and_may_differ() -> None:
    config = load("distillation_math_cpu.yaml", "policy.max_total_sequence_length=96")
    teacher = config.teacher
    assert (teacher.precision, teacher.max_total_sequence_length, teacher.logprob_batch_size) == ("float32", 96, 64)
    assert teacher.optimizer is None and teacher.generation is None and teacher.colocated.enabled
    assert Path(teacher.model_name).is_absolute()
    assert teacher.tokenizer.name == teacher.model_name
    other = load("distillation_math_cpu.yaml", "teacher.precision=bfloat16", "teacher.logprob_batch_size=4").teacher
    assert (other.precision, other.logprob_batch_size, other.sequence_packing.logprob_mb_tokens) == ("bfloat16", 4, 512)


def test_a_teacher_section_as_long_as_a_policy_section_is_accepted() -> None:
    """NeMo RL's files repeat the policy in the teacher, optimizer and generation included."""
    keys = ("optimizer={name: torch.optim.AdamW, kwargs: {lr: 1e-3}}", "generation={backend: vllm, temperature: 0.5}")
    config = load("distillation_math_cpu.yaml", *(f"teacher.{key}" for key in keys))
    assert config.teacher.optimizer is not None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["teacher.model_name=./nowhere"], r"teacher\.model_name='\./nowhere' does not exist"),
        (["teacher.max_total_sequence_length=64"], r"=64 is less than policy\.max_total_sequence_length=128"),
        (["teacher.dynamic_batching.enabled=true"], r"teacher\.dynamic_batching\.enabled=true exclude each other"),
        (["teacher.megatron_cfg.enabled=true"], r"teacher\.megatron_cfg\.enabled=true name two training backends"),
        (["teacher.dtensor_cfg.enabled=false"], r"teacher\.dtensor_cfg\.enabled=false leaves no training backend"),
        (["teacher.dtensor_cfg.lora_cfg.enabled=true"], r"teacher\.dtensor_cfg\.lora_cfg\.enabled=true adds untrained"),
        (
            ["teacher.megatron_cfg.enabled=true", "teacher.megatron_cfg.peft.enabled=true"],
            r"teacher\.megatron_cfg\.peft\.enabled=true adds untrained",
        ),
        (["teacher.reward_model_cfg.enabled=true"], "scores whole answers"),
        ([*CUDA, APART], r"needs teacher\.colocated\.resources\.gpus_per_node"),
        ([*CUDA, APART, "teacher.colocated.resources.gpus_per_node=8"], "leaves no device for the policy"),
        (
            [*CUDA, "cluster.num_nodes=2", APART, "teacher.colocated.resources.num_nodes=2"],
            "leaves no device for the policy",
        ),
        (
            [*CUDA, APART, "teacher.colocated.resources.gpus_per_node=3"],
            r"64 / 5 = 12\.8\. Nearest values: 60, 65",
        ),
        (["distillation.num_prompts_per_step=50"], r"distillation\.num_prompts_per_step=50 x .*\n.*Nearest values"),
        (["loss_fn.mixed_kl_weight=1"], r"leaves only the forward part .* Set loss_fn\.kl_type=forward"),
        (["loss_fn.kl_type=backward"], r"kl_type='backward' .*forward"),
        (["distillation.stop_at_validation_metric=accuracy"], r"needs both distillation\.stop_at"),
        (["policy.generation=null"], r"policy\.generation is null, but the policy samples answers"),
        (["distillation.topk_logits=3"], "topk_logits_k"),
        (["loss_fn.gold_loss=true", "loss_fn.xtoken_loss=true"], "compare tokens in two ways"),
        (["loss_fn.gold_loss=true", "loss_fn.zero_outside_topk=true"], "zero_outside_topk=true has no meaning with"),
        (["loss_fn.vocab_topk=9"], r"vocab_topk=9 is for loss_fn\.gold_loss.* Set distillation\.topk_logits_k"),
        (["loss_fn.exact_token_match_only=true"], "exact_token_match_only=true is for loss_fn.gold_loss"),
        (
            ["loss_fn.gold_loss=true", "teacher.projection_matrix_path=pyproject.toml"],
            r"teacher\.projection_matrix_path is for loss_fn\.xtoken_loss",
        ),
        (["loss_fn.xtoken_loss=true", "cluster.rollout_runners=1"], "works with GRPO only"),
        (["data.validation=null"], r"distillation\.val_period=10 requests validation"),
    ],
)
def test_contradictions_are_refused(overrides, words) -> None:
    with pytest.raises(ConfigError, match=words):
        load("distillation_math_cpu.yaml", *overrides)


@pytest.mark.parametrize(
    ("cluster", "resources", "student", "teacher"),
    [
        ({"device": "cpu"}, {"ranks_per_node": 2}, (1, 1), (1, 2)),
        ({"device": "cpu", "ranks_per_node": 3}, {}, (1, 3), (1, 1)),
        ({"gpus_per_node": 8}, {"gpus_per_node": 3}, (1, 5), (1, 3)),
        ({"gpus_per_node": 8, "num_nodes": 4}, {"num_nodes": 1}, (3, 8), (1, 8)),
        ({"gpus_per_node": 8, "num_nodes": 4}, {"num_nodes": 2, "gpus_per_node": 4}, (2, 8), (2, 4)),
    ],
)
def test_a_separate_teacher_takes_its_share_of_the_machines(cluster, resources, student, teacher) -> None:
    machines = ClusterConfig.build(**cluster)
    config = load("distillation_math_cpu.yaml")
    shared = divide_cluster(machines, config.models)
    config.teacher.colocated = PlacementConfig.build(enabled=False, resources=resources)
    parts = divide_cluster(machines, config.models)
    topology, own = plan_topology(parts["policy"], config.policy), parts["teacher"]
    assert (topology.policy_nodes, topology.policy_ranks_per_node) == student
    assert (own.num_nodes, own.policy_ranks_per_node) == teacher
    assert shared["policy"] is shared["teacher"] is machines


def test_teachers_with_other_tokenizers_score_at_the_temperature_of_the_student() -> None:
    keys = ("policy.generation.temperature=0.7", "teachers.code={model_name: examples/assets/tiny-teacher}")
    config = load("distillation_math_cpu.yaml", "loss_fn.gold_loss=true", *keys)
    for teacher in config.sections_of_teachers.values():
        assert teacher.generation is not None and teacher.generation.temperature == 0.7
    assert load("distillation_math_cpu.yaml", *keys).teacher.generation is None
