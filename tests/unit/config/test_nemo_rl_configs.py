"""Configurations written for NeMo RL: what loads, which keys give a notice, and what is refused.

`nemo_rl/` holds one configuration for each algorithm with all keys that NeMo RL has, at its defaults.
"""

import logging
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from nemo_rl.config import REPOSITORY_ROOT, ClusterConfig, PolicyConfig, Section, load_config
from nemo_rl.config.base.availability import Later
from nemo_rl.config.base.structure import Slot
from nemo_rl.config.loading.algorithms import ALGORITHMS, algorithm_of
from nemo_rl.config.loading.all_errors import collect_errors
from nemo_rl.config.rules.training import check_generation
from nemo_rl.utils.errors import ConfigError

SHAPES = Path(__file__).parent / "nemo_rl"

NEUTRAL: tuple[Any, ...] = (None, False, 0, "", [], {}, {"enabled": False, "x": 1})
SWITCHED_ON: dict[type, Any] = {bool: True, int: 7, str: "text", list: ["text"], dict: {"enabled": True, "x": 1}}
"""A value of each kind that asks for something."""

ACCEPTED = {
    "grpo": (
        "policy.generation_batch_size=32",
        "cluster.gpus_per_node=8",
        "policy.dtensor_cfg.dp_replicate_size=2",
        "policy.dtensor_cfg.tensor_parallel_size=2",
        "policy.dtensor_cfg.context_parallel_size=2",
        "policy.dtensor_cfg.expert_parallel_size=2",
        "policy.generation.vllm_cfg.enable_prefix_caching=false",
        "policy.generation.sglang_cfg={tp_size: 1, sglang_server_config: {num_gpus: 2, num_gpus_per_engine: 1}}",
        "policy.generation.vllm_cfg.logprobs_mode=raw_logprobs",
        "policy.generation.vllm_cfg.env_vars={VLLM_USE_RAY_V2_EXECUTOR_BACKEND: 1}",
        "policy.sequence_packing.microbatch_order=largest_first",
        "policy.sequence_packing.train_mb_tokens=100",
        "policy.generation.vllm_cfg.http_server_serving_chat_kwargs={default_chat_template_kwargs: {a: false}}",
        "policy.generation.mcore_generation_config.buffer_guaranteed_fraction=0.1",
        "policy.generation.mcore_generation_config.unified_memory_level=1",
        "cluster.segment_size=8",
        "data_plane={enabled: true, impl: transfer_queue, backend: simple, storage_capacity: 1000000}",
        "async_rl={sampler: {name: in_order, max_lookahead_versions: 0}}",
        "grpo.max_num_epochs=-1",
        "policy.offload_optimizer_for_logprob=true",
        "policy.dtensor_cfg.automodel_kwargs={force_hf: true}",
        "grpo.val_period=-1",
        "logger.swanlab_enabled=true",
        "data.validation=[{dataset_name: AIME2024, repeat: 16}, {dataset_name: AIME2025}]",
        "data.train.max_samples=100000",
        "grpo.batch_multiplier=2.5",
        "env={math: {}, nemo_gym: {config_paths: [a.yaml]}, code: {num_workers: 4}}",
    ),
    "sft": (
        "data.train={_override_: true, dataset_name: arrow_text, data_files: a.arrow, text_key: t}",
        "policy.scheduler=[{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0}}, {milestones: []}]",
        "data.train.split_validation_size=64",
        "policy.dtensor_cfg.lora_cfg={enabled: true, match_all_linear: false, exclude_modules: ['*out_proj*']}",
        "policy.dtensor_cfg.env_vars={B: 2}",
    ),
    "dpo": ("dpo.val_period=-1",),
    "rm": ("rm.val_period=-1", "data.train.split_validation_size=0", "data.validation=null"),
    "ppo": (
        "value.generation_batch_size=64",
        "value.offload_optimizer_for_logprob=true",
        "value.train_global_batch_size=256",
        "value.reward_model_cfg={enabled: false, reward_model_type: regression}",
        "ppo.max_num_epochs=-1",
        "ppo.async_ppo={enabled: true, warmup_generation_lead_steps: 4}",
        "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}",
        "cluster.gpus_per_node=2",
        "ppo.adv_estimator={name: gae, gae_lambda_policy: 0.95, gae_lambda_value: 1.0, length_adaptive_alpha: 0.05}",
        "ppo.policy_training_start_step=50",
        "ppo.val_period=-1",
        "loss_fn.positive_example_nll_weight=0.1",
        "value_loss_fn={scale: 1.0, cliprange: null}",
    ),
    "distillation": (
        "teacher.generation_batch_size=64",
        "teacher.offload_optimizer_for_logprob=true",
        "distillation.val_period=-1",
        "policy.generation.bad_words=['<image>','<img>']",
        "data.validation={dataset_name: AIME2024, repeat: 16}",
    ),
    "eval": ("data.repeat=4",),
}

TO_MEGATRON = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true")
MEGATRON_FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "a dense model": (
        "grpo",
        (
            "policy.optimizer=null",
            "policy.scheduler=null",
            "policy.make_sequence_length_divisible_by=${policy.megatron_cfg.tensor_model_parallel_size}",
            "policy.megatron_cfg.tensor_model_parallel_size=2",
            "policy.megatron_cfg.pipeline_model_parallel_size=2",
            "policy.megatron_cfg.context_parallel_size=2",
            "policy.megatron_cfg.sequence_parallel=true",
            "policy.megatron_cfg.activation_checkpointing=true",
            "policy.megatron_cfg.converter_type=Qwen2ForCausalLM",
            "policy.megatron_cfg.pipeline_dtype=${policy.precision}",
            "policy.megatron_cfg.checkpoint={async_save: false, ckpt_assume_constant_structure: true}",
            "policy.megatron_cfg.moe_per_layer_logging=true",
            "policy.megatron_cfg.peft={enabled: true, dim: 8}",
            "policy.megatron_cfg.moe_router_bias_update_rate=1.0e-3",
            "policy.megatron_cfg.distributed_data_parallel_config.average_in_collective=true",
            "policy.megatron_cfg.env_vars={PYTORCH_CUDA_ALLOC_CONF: 'expandable_segments:False'}",
            "cluster.gpus_per_node=8",
        ),
    ),
    "a large mixture of experts": (
        "grpo",
        (
            "policy.megatron_cfg.expert_model_parallel_size=16",
            "policy.megatron_cfg.tensor_model_parallel_size=8",
            "policy.megatron_cfg.pipeline_model_parallel_size=16",
            "policy.megatron_cfg.num_layers_in_first_pipeline_stage=3",
            "policy.megatron_cfg.num_layers_in_last_pipeline_stage=2",
            "policy.megatron_cfg.sequence_parallel=true",
            "policy.megatron_cfg.moe_permute_fusion=false",
            "policy.megatron_cfg.apply_rope_fusion=false",
            "policy.megatron_cfg.defer_fp32_logits=true",
            "policy.megatron_cfg.empty_unused_memory_level=2",
            "policy.megatron_cfg.optimizer.optimizer_cpu_offload=true",
            "policy.megatron_cfg.optimizer.optimizer_offload_fraction=1.0",
            "policy.megatron_cfg.optimizer.use_precision_aware_optimizer=false",
            "cluster={gpus_per_node: 8, num_nodes: 32}",
        ),
    ),
    "a schedule": (
        "sft",
        (
            "policy.megatron_cfg.optimizer.lr=2.0e-5",
            "policy.megatron_cfg.optimizer.min_lr=1.99999e-5",
            "policy.megatron_cfg.scheduler.lr_decay_style=cosine",
            "policy.megatron_cfg.scheduler.lr_decay_iters=32",
            "policy.megatron_cfg.scheduler.lr_warmup_iters=1",
            "policy.megatron_cfg.scheduler.lr_warmup_init=1.99999e-5",
        ),
    ),
    "preferences": ("dpo", ("policy.megatron_cfg.bias_activation_fusion=false",)),
    "a reward model": ("rm", ("policy.megatron_cfg.recompute_granularity=selective",)),
}
"""Values of NeMo RL's own files of this kind."""

WITHOUT_EFFECT = {
    "grpo": (
        "policy.generation_batch_size=32",
        "grpo.zero_variance_prompt_filtering=false",
        "grpo.penalize_invalid_tool_call=true",
        "grpo.penalize_malformed_thinking=true",
        "grpo.invalid_tool_call_strategy=mask",
        "grpo.num_val_generations_per_prompt=1",
        "policy.dtensor_cfg.sequence_parallel=true",
        "policy.dtensor_cfg.custom_parallel_plan=a.b",
        "policy.sequence_packing.algorithm=modified_ffd",
        "policy.generation.vllm_cfg.max_num_seqs=64",
        "policy.dtensor_cfg.automodel_kwargs.attn_implementation=flash_attention_2",
        "policy.dtensor_cfg.automodel_kwargs.use_sdpa_patching=false",
        "grpo.val_best_at_k_values=[1,2]",
        "sif_dir=/images",
        "env.dapo={num_workers: 8}",
        "policy.generation.vllm_cfg.enable_expert_parallel=true",
        "policy.generation.vllm_cfg.enforce_monotonicity=false",
        "policy.generation.vllm_cfg.enable_thinking=true",
        "data.add_system_prompt=false",
        "data.prompt_file=null",
        "data.dataset_name=DAPOMath17K",
        "grpo.batch_multiplier=2",
        "grpo.calculate_advantages_on_gpu=true",
        "grpo.deduplicate_multimodal_data=true",
        "policy.generation.vllm_cfg.async_engine=true",
        "policy.generation.use_async_rollouts=true",
        "policy.generation.mcore_generation_config={max_model_len: 99, num_cuda_graphs: 4}",
        "policy.generation.refit_cfg={nixl: {device: cuda}}",
        "policy.sequence_packing.fuse_loss=true",
        "policy.dtensor_cfg.automodel_kwargs.backend={_target_: a.b, attn: te}",
        "policy.dtensor_cfg.automodel_kwargs.use_liger_kernel=true",
        "policy.dtensor_cfg.defer_fsdp_grad_sync=true",
        "checkpointing.is_peft=true",
    ),
    "sft": ("env={math: {num_workers: 8}}",),
}

NOT_BUILT = {
    "grpo": (
        "policy.megatron_cfg.fp8_cfg.fp8_param=true",
        "policy.megatron_cfg.cuda_graph_impl=transformer_engine",
        "policy.megatron_cfg.moe_enable_deepep=true",
        "policy.megatron_cfg.moe_token_dispatcher_type=flex",
        "policy.megatron_cfg.optimizer.fp16=true",
        "policy.megatron_cfg.distributed_data_parallel_config.use_custom_fsdp=true",
        "policy.generation.mcore_generation_config.expose_http_server=true",
        "policy.generation.backend=trtllm",
        "policy.quant_cfg=a.yaml",
        "policy.dequantize_base_checkpoint=true",
        "async_rl.generation_router={enabled: true}",
        "data.train.allowed_problem_types=[a]",
        "data.custom_dataloader=a.b",
    ),
    "distillation": ("loss_fn.ce_loss_scale=0.1", "loss_fn.kd_loss_mode=averaged_logits"),
    "eval": ("tokenizer.video={num_frames: 32}",),
}


PASSING = {bool: "false", int: "0", str: "''", list: "[]", dict: "enabled: false"}


def written(folder: Path, algorithm: str, *overrides: str) -> Path:
    """Write the configuration of an algorithm with further keys, in a file that inherits from it."""
    content: dict[str, Any] = {"defaults": str(SHAPES / f"{algorithm}.yaml")}
    for text in overrides:
        key, value = text.lstrip("+").split("=", 1)
        *parents, last = key.split(".")
        place = content
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = yaml.safe_load(value)
    path = folder / f"{algorithm}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_keys_of_nemo_rl_load_at_its_defaults(algorithm: str) -> None:
    path = SHAPES / f"{algorithm}.yaml"
    assert algorithm_of(path) == algorithm
    load_config(path, schema=ALGORITHMS[algorithm])


@pytest.mark.parametrize("algorithm", ACCEPTED)
def test_nemo_rl_keys_load_with_their_meaning(tmp_path: Path, algorithm: str) -> None:
    assert collect_errors(written(tmp_path, algorithm, *ACCEPTED[algorithm]), algorithm) == []


@pytest.mark.parametrize("kind", MEGATRON_FILES)
def test_nemo_rl_files_for_megatron_load(tmp_path: Path, kind: str) -> None:
    algorithm, changes = MEGATRON_FILES[kind]
    config = load_config(written(tmp_path, algorithm, *TO_MEGATRON, *changes), schema=ALGORITHMS[algorithm])
    assert config.policy.backend_key == "megatron_cfg"
    assert config.policy.backend_section is config.policy.megatron_cfg
    assert config.policy.megatron_cfg.optimizer.clip_grad == config.policy.max_grad_norm == 1.0


def test_the_megatron_engine_key_acts_with_that_engine(tmp_path: Path) -> None:
    lengths = "policy.generation.mcore_generation_config.max_model_len=384", "policy.generation.max_new_tokens=256"
    for engine, context in (("megatron", 384), ("vllm", 512)):
        path = written(tmp_path, "grpo", *lengths, f"policy.generation.backend={engine}")
        generation = load_config(path).policy.generation
        assert generation is not None and generation.engine.max_model_len == context


def test_the_megatron_async_save_key_saves_in_the_background(tmp_path: Path) -> None:
    asked = "policy.megatron_cfg.checkpoint.async_save=true"
    assert not load_config(written(tmp_path, "sft", asked), schema=ALGORITHMS["sft"]).checkpointing.is_async
    assert load_config(written(tmp_path, "sft", *TO_MEGATRON, asked), schema=ALGORITHMS["sft"]).checkpointing.is_async
    quiet = written(tmp_path, "sft", *TO_MEGATRON, asked.replace("true", "false"))
    assert not load_config(quiet, schema=ALGORITHMS["sft"]).checkpointing.is_async
    assert load_config(quiet, ["checkpointing.is_async=true"], schema=ALGORITHMS["sft"]).checkpointing.is_async


def test_a_rate_for_an_absent_bias_has_no_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = ("moe_router_bias_update_rate=1.0e-3", "moe_router_enable_expert_bias=false")
    path = written(tmp_path, "sft", *TO_MEGATRON, *(f"policy.megatron_cfg.{key}" for key in keys))
    with caplog.at_level(logging.INFO, "nemo_rl.config"):
        load_config(path, schema=ALGORITHMS["sft"])
    assert "moe_router_bias_update_rate (moe_router_enable_expert_bias is false)" in caplog.text


def test_keys_of_megatron_that_nothing_reads_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = ("track_moe_metrics=true", "train_iters=100", "scheduler.override_opt_param_scheduler=true")
    path = written(tmp_path, "sft", *TO_MEGATRON, *(f"policy.megatron_cfg.{key}" for key in keys))
    with caplog.at_level(logging.INFO, "nemo_rl.config"):
        load_config(path, schema=ALGORITHMS["sft"])
    assert all(f"policy.megatron_cfg.{key.split('=')[0]} (" in caplog.text for key in keys)


@pytest.mark.parametrize("name", ["moonshotai/Kimi-K2.5", "google/gemma-4-31B-it", "zai-org/GLM-5.1"])
def test_a_family_that_megatron_does_not_train_is_told_at_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    asked = f"policy.model_name={name}"
    load_config(written(tmp_path, "sft", asked), schema=ALGORITHMS["sft"])
    assert "is of the family" not in caplog.text
    load_config(written(tmp_path, "sft", *TO_MEGATRON, asked), schema=ALGORITHMS["sft"])
    assert f"policy.model_name={name} is of the family" in caplog.text
    caplog.clear()
    for known in ("Qwen/Qwen3-4B", "Qwen/Qwen3.5-4B", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"):
        load_config(written(tmp_path, "sft", *TO_MEGATRON, f"policy.model_name={known}"), schema=ALGORITHMS["sft"])
    assert "is of the family" not in caplog.text


def test_an_override_removes_an_unknown_key_of_a_file(tmp_path: Path) -> None:
    path = written(tmp_path, "grpo", "grpo.no_such_key=3", "policy.no_such_section.a.b=1", "policy.max_grad_norm=0.5")
    removed = ["~grpo.no_such_key", "~policy.no_such_section", "policy.max_grad_norm=0.25"]
    assert load_config(path, removed).policy.max_grad_norm == 0.25
    assert collect_errors(path, "grpo", removed) == []
    with pytest.raises(ConfigError, match="unknown key 'policy.no_such_section'"):
        load_config(path, ["~grpo.no_such_key"])
    with pytest.raises(ConfigError, match="grpo.never_written"):
        load_config(path, [*removed, "~grpo.never_written"])


def test_a_key_that_only_interpolations_read_is_a_variable(tmp_path: Path) -> None:
    path = written(tmp_path, "sft", "my_length=640", "policy.max_total_sequence_length=${my_length}", "others={a: 3}")
    assert len(collect_errors(path, "sft")) == 1
    with pytest.raises(ConfigError, match="unknown key 'others'"):
        load_config(path, schema=ALGORITHMS["sft"])
    config = load_config(path, ["~others"], schema=ALGORITHMS["sft"])
    assert config.policy.max_total_sequence_length == 640 and "my_length" not in config
    config = load_config(path, ["~others", "my_length=320"], schema=ALGORITHMS["sft"])
    assert config.policy.max_total_sequence_length == 320


def test_the_data_plane_is_played_by_runners_where_a_run_can_have_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machines = "data_plane.enabled=true", "cluster={num_nodes: 4, gpus_per_node: 8}"
    with caplog.at_level(logging.INFO, "nemo_rl.config"):
        assert load_config(written(tmp_path, "grpo", *machines)).cluster.rollout_runners == 4
        assert "data_plane.enabled=true: cluster.rollout_runners=4." in caplog.text
        gdpo = written(tmp_path, "grpo", *machines, "grpo.adv_estimator.name=gdpo")
        assert load_config(gdpo).cluster.rollout_runners == 0
    assert "but rows pass the driver: cluster.rollout_runners=4 keeps tokens out of the driver, but" in caplog.text
    assert load_config(written(tmp_path, "grpo", *machines), ["cluster.rollout_runners=2"]).cluster.rollout_runners == 2
    config = load_config(written(tmp_path, "sft", "data_plane.enabled=true"), schema=ALGORITHMS["sft"])
    assert config.cluster.rollout_runners == 0


def test_a_look_ahead_of_zero_takes_turns(tmp_path: Path) -> None:
    for sampler in ("{name: in_order, max_lookahead_versions: 0}", "{name: weight_fifo, max_staleness_versions: 0}"):
        assert load_config(written(tmp_path, "grpo", f"async_rl={{sampler: {sampler}}}")).grpo.overlap.mode == "none"


def test_a_critic_always_has_a_scalar_head(tmp_path: Path) -> None:
    path = written(tmp_path, "ppo", "value.reward_model_cfg.enabled=false", "ppo.max_num_epochs=-1")
    config = load_config(path, schema=ALGORITHMS["ppo"])
    assert config["value"].reward_model_cfg.enabled is True and config["ppo"].max_num_epochs > 10**8


@pytest.mark.parametrize(("algorithm", "train"), [("sft", 512), ("dpo", 1024), ("rm", 1024)])
def test_a_budget_below_one_sample_is_raised_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, algorithm: str, train: int
) -> None:
    keys = ("max_total_sequence_length=512", "sequence_packing={enabled: true, train_mb_tokens: 100}")
    path = written(tmp_path, algorithm, *(f"policy.{key}" for key in keys), "policy.dynamic_batching.enabled=false")
    with caplog.at_level(logging.INFO, "nemo_rl.config"):
        config = load_config(path, schema=ALGORITHMS[algorithm])
    assert config.policy.sequence_packing.train_mb_tokens == train
    assert "policy.sequence_packing.train_mb_tokens=100 is less than" in caplog.text


def test_machines_for_models_of_nemo_gym_are_left_to_them(tmp_path: Path) -> None:
    keys = ("data.default.env_name=nemo_gym", "data.default.processor=nemo_gym_data_processor")
    rows = "data.train={_override_: true, dataset_name: NemoGymDataset, data_path: rows.jsonl}"
    gym = "env.nemo_gym={config_paths: [a.yaml], num_gpu_nodes: 2}"
    asked = (*keys, rows, "data.validation=null", "grpo.val_period=0", "grpo.val_at_start=false", gym)
    path = written(tmp_path, "grpo", *asked, "cluster={num_nodes: 6, gpus_per_node: 8}")
    config = load_config(path, check=False)
    assert (config.cluster.num_nodes, config.model_cluster.num_nodes, config.policy_cluster.num_nodes) == (6, 4, 4)
    (found,) = collect_errors(path, "grpo", ["cluster.num_nodes=2"])
    assert "env.nemo_gym.num_gpu_nodes=2 leaves no machine" in found


def test_megatron_defaults_follow_the_same_keys_as_in_nemo_rl(tmp_path: Path) -> None:
    megatron = {"enabled": True, "tensor_model_parallel_size": 4, "optimizer": {"weight_decay": 0.2}}
    policy = {"model_name": "m", "max_grad_norm": 0.3, "dtensor_cfg": {"enabled": False}, "megatron_cfg": megatron}
    content = {
        "sft": {"val_period": 0, "val_at_start": False},
        "data": {"train": {"dataset_name": "squad"}},
        "policy": policy,
        "cluster": {"gpus_per_node": 4},
    }
    path = tmp_path / "short.yaml"
    path.write_text(yaml.safe_dump(content))
    found = load_config(path, schema=ALGORITHMS["sft"]).policy.megatron_cfg
    assert found.optimizer.clip_grad == 0.3
    assert (found.scheduler.start_weight_decay, found.scheduler.end_weight_decay) == (0.2, 0.2)


def test_notices_are_about_the_backend_that_trains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "nemo_rl.config"):
        load_config(SHAPES / "sft.yaml", schema=ALGORITHMS["sft"])
        assert "policy.dtensor_cfg._v2 (" in caplog.text and "policy.megatron_cfg" not in caplog.text
        caplog.clear()
        load_config(written(tmp_path, "sft", *TO_MEGATRON), schema=ALGORITHMS["sft"])
        assert "policy.megatron_cfg.optimizer.bf16 (follows policy.precision" in caplog.text
        assert "policy.optimizer (see megatron_cfg.optimizer)" in caplog.text
        assert "policy.dtensor_cfg" not in caplog.text


@pytest.mark.parametrize("algorithm", WITHOUT_EFFECT)
def test_keys_without_effect_load_with_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, algorithm: str
) -> None:
    keys = WITHOUT_EFFECT[algorithm]
    with caplog.at_level(logging.INFO, "nemo_rl.config"):
        load_config(written(tmp_path, algorithm, *keys), schema=ALGORITHMS[algorithm])
    (message,) = caplog.messages
    assert message.startswith("Keys without effect: ")
    assert [key for key in keys if f" {key.split('=')[0]} (" not in message] == []


@pytest.mark.parametrize("algorithm", NOT_BUILT)
def test_unsupported_keys_are_refused_by_name(tmp_path: Path, algorithm: str) -> None:
    found = collect_errors(written(tmp_path, algorithm, *NOT_BUILT[algorithm]), algorithm)
    assert {text.split("=")[0] for text in found} == {key.split("=")[0] for key in NOT_BUILT[algorithm]}
    assert len(found) == len(NOT_BUILT[algorithm]) and all("not built yet: " in text for text in found)


def test_unsupported_data_and_environments_are_refused(tmp_path: Path) -> None:
    changes = ("data.train={dataset_name: avqa}", "data.default.env_name=mmau", "env={mmau: {}, math: {}}")
    found = collect_errors(written(tmp_path, "grpo", *changes), "grpo")
    assert len(found) == 2 and all("not built yet" in text for text in found)
    assert {text.split("=")[0] for text in found} == {"data.train.env_name", "data.train.dataset_name"}


def sections(root: type[Section], path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield every section with its dotted path, except those of lists."""
    yield path, root
    for name, field in root.model_fields.items():
        for below in Slot.of(field.annotation, field.metadata).sections:
            yield from sections(below, f"{path}.{name}" if path else name)


def nested(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return tree


def later_keys(algorithm: str) -> dict[str, tuple[Any, ...]]:
    """Yield every key of a feature that is not implemented, with its neutral values."""
    found = {}
    samples = algorithm in ("grpo", "ppo", "distillation")
    for path, section in sections(ALGORITHMS[algorithm]):
        if "training_backend" not in path and (path != "policy.generation" or samples):
            for key in section.later:
                found[f"{path}.{key}".lstrip(".")] = section.neutral.get(key, ())
    supervised = algorithm in ("sft", "dpo", "rm")
    unwanted = ("policy.generation.", "teacher.") if supervised else ("policy.generation.engine.",)
    return {
        key: neutral
        for key, neutral in found.items()
        if not key.startswith((*unwanted, "teacher.generation.", "value.generation.", "data.validation.", "async_rl."))
    }


def written_tree(folder: Path, algorithm: str, values: dict[str, Any]) -> Path:
    path = folder / "tree.yaml"
    path.write_text(yaml.safe_dump({"defaults": str(SHAPES / f"{algorithm}.yaml"), **nested(values)}))
    return path


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_neutral_values_of_unsupported_keys_load(tmp_path: Path, algorithm: str) -> None:
    keys = later_keys(algorithm)
    assert len(keys) > 10
    values = {key: neutral[0] if neutral else value for (key, neutral), value in zip(keys.items(), cycle(NEUTRAL))}
    marked = {key: {"_override_": True, **value} if isinstance(value, dict) else value for key, value in values.items()}
    assert collect_errors(written_tree(tmp_path, algorithm, marked), algorithm) == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_other_values_of_unsupported_keys_are_refused_together(tmp_path: Path, algorithm: str) -> None:
    keys = later_keys(algorithm)
    kinds = dict(zip(keys, cycle(SWITCHED_ON), strict=False))
    values = {key: SWITCHED_ON[int if keys[key] else kind] for key, kind in kinds.items()}
    found = collect_errors(written_tree(tmp_path, algorithm, values), algorithm)
    refused = {text.split("=")[0]: text for text in found}
    assert set(refused) == set(keys) and len(found) == len(keys)
    for key, text in refused.items():
        assert "tree.yaml): not built yet: " in text
        assert text.endswith(
            f"Values that pass: {', '.join([*map(str, keys[key]), PASSING[type(values[key])]])}, null."
        )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_value_of_every_key_loads_or_is_refused_by_name(algorithm: str) -> None:
    for _, section in sections(ALGORITHMS[algorithm]):
        later = Later(section.later, section.neutral)
        for key, feature in section.later.items():
            for value in (*NEUTRAL, *section.neutral.get(key, ())):
                assert later.drop({key: value}) == {}
            for kind, value in SWITCHED_ON.items():
                ((named, refusal),) = later.switched_on({key: value})
                assert named == key and feature in refusal and refusal.endswith(f"{PASSING[kind]}, null")


def test_errors_of_every_stage_are_reported_together(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "grpo",
        "grpo.num_promts_per_step=3",
        "policy.megatron_cfg.moe_enable_deepep=true",
        "policy.quant_cfg=x",
        "policy.generation.vllm_cfg.kv_cache_dtype=fp4",
        "policy.train_micro_batch_size=none",
        "grpo.batch_multiplier=1.3",
    )
    found = collect_errors(path, "grpo")
    assert [text.split("=")[0].split(": ")[-1].split("'")[0] for text in found] == [
        "unknown key ",
        "policy.quant_cfg",
        "policy.megatron_cfg.moe_enable_deepep",
        "policy.train_micro_batch_size",
        "policy.generation.engine.kv_cache_dtype",
    ]
    assert "Did you mean 'grpo.num_prompts_per_step'?" in found[0]
    uneven = ["grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=1.3"]
    rules = collect_errors(written(tmp_path, "grpo", *uneven), "grpo")
    assert rules == collect_errors(SHAPES / "grpo.yaml", "grpo", uneven)
    assert len(rules) == 1 and "is not a whole number" in rules[0]


def test_old_names_next_to_new_ones_are_refused(tmp_path: Path) -> None:
    """A null sets nothing; a prompt file would have been used, so it is refused."""
    (found,) = collect_errors(written(tmp_path, "grpo", "data.prompt_file=a.txt"), "grpo")
    assert "data.prompt_file='a.txt'" in found and "write data.default.prompt_file" in found
    (found,) = collect_errors(written(tmp_path, "grpo", "data.dataset_name=DAPOMath17K", "data.train=null"), "grpo")
    assert "write data.train.dataset_name" in found


@pytest.mark.parametrize(
    ("key", "value", "same"),
    [
        ("top_k", -1, True),
        ("val_temperature", 0.0, True),
        ("temperature", 0.7, False),
        ("top_p", 0.9, False),
        ("top_k", 50, False),
        ("bad_words", ["a"], False),
    ],
)
def test_raw_logprobs_are_accepted_only_without_a_sampling_filter(key: str, value: Any, same: bool) -> None:
    generation = {"vllm_cfg": {"logprobs_mode": "raw_logprobs"}, key: value}
    found = list(check_generation(PolicyConfig.build(model_name="m", generation=generation), ClusterConfig()))
    assert (found == []) is same
    assert all("importance ratios would be wrong" in text and f"{key}={value}" in text for text in found)


def test_numeric_environment_variables_become_strings() -> None:
    policy = PolicyConfig.build(
        model_name="m", dtensor_cfg={"env_vars": {"B": 2}}, generation={"vllm_cfg": {"env_vars": {"A": 1}}}
    )
    assert policy.generation is not None
    assert (policy.generation.engine.env_vars, policy.dtensor_cfg.env_vars) == ({"A": "1"}, {"B": "2"})


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    sys.path.insert(0, str(REPOSITORY_ROOT / "tools"))
    try:
        import check_nemo_rl_config
    finally:
        sys.path.pop(0)
    return check_nemo_rl_config


def run(checker: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["check_nemo_rl_config.py", *arguments])
    status: int = checker.main()
    return status


def test_the_checker_reports_each_file_and_exits_nonzero_on_errors(
    checker: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = written(tmp_path, "sft", "policy.model_name=/no/such/model")
    bad = written(tmp_path, "grpo", "policy.quant_cfg=a.yaml", "grpo.vall_period=3")
    assert run(checker, monkeypatch, str(good)) == 0
    assert capsys.readouterr().out == f"{good} (sft): loads\n"
    assert run(checker, monkeypatch, str(good), str(bad)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"{good} (sft): loads", f"{bad} (grpo): does not load"] and len(lines) == 4
    assert "'grpo.vall_period'. Did you mean 'grpo.val_period'?" in lines[2]
    assert lines[3].startswith("  - policy.quant_cfg=") and "not built yet: quantised training" in lines[3]
    assert run(checker, monkeypatch, str(SHAPES / "common.yaml")) == 1
    assert "Give --algorithm" in capsys.readouterr().out
    assert run(checker, monkeypatch, str(good), "sft.val_batches=0", "--algorithm", "sft") == 1
    assert "sft.val_batches=0 validates on nothing" in capsys.readouterr().out
    assert run(checker, monkeypatch, str(tmp_path / "missing.yaml")) == 1
    assert "there is no config file" in capsys.readouterr().out


_RECIPE = """\
# a recipe
defaults: {base}
policy:  # the model
  dtensor_cfg:
    _v2: true
    tensor_parallel_size: 2   # dtensor_cfg of one machine
    env_vars: {{A: "1"}}
  make_sequence_length_divisible_by: ${{policy.dtensor_cfg.tensor_parallel_size}}
cluster: {{gpus_per_node: 2}}
"""


def test_the_checker_renames_the_backend_in_both_directions(
    checker: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    text = _RECIPE.format(base=SHAPES / "sft.yaml")
    path.write_text(text)
    before = load_config(path, schema=ALGORITHMS["sft"])
    assert run(checker, monkeypatch, str(path), "--write", "automodel_cfg") == 0
    lines = path.read_text().splitlines()
    assert lines[3:6] == [
        "  automodel_cfg:",
        "    # _v2: true",
        "    tensor_parallel_size: 2   # dtensor_cfg of one machine",
    ]
    assert lines[7] == "  make_sequence_length_divisible_by: ${policy.automodel_cfg.tensor_parallel_size}"
    assert load_config(path, schema=ALGORITHMS["sft"]) == before
    assert run(checker, monkeypatch, str(path), "--write", "dtensor_cfg") == 0
    assert path.read_text() == text


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_keys_of_nemo_rl_load_under_the_newer_name_of_its_backend(
    checker: ModuleType, tmp_path: Path, algorithm: str
) -> None:
    for source in SHAPES.glob("*.yaml"):
        newer = checker.renamed(source.read_text(), "automodel_cfg")
        assert checker.renamed(newer, "dtensor_cfg") == source.read_text()
        (tmp_path / source.name).write_text(newer)
    path = f"{algorithm}.yaml"
    read = [load_config(folder / path, schema=ALGORITHMS[algorithm]) for folder in (SHAPES, tmp_path)]
    assert read[0] == read[1]


def test_a_value_left_open_is_requested(tmp_path: Path) -> None:
    path = tmp_path / "open.yaml"
    path.write_text(
        "sft: {val_period: 0, val_at_start: false}\npolicy: {model_name: '???'}\ndata: {train: {dataset_name: squad}}"
    )
    (found,) = collect_errors(path, "sft")
    assert found.startswith("policy.model_name has no value")
    assert collect_errors(path, "sft", ["policy.model_name=Qwen/Qwen3-4B"]) == []


def test_a_file_for_ppo_is_found_by_its_section(tmp_path: Path) -> None:
    path = tmp_path / "ppo.yaml"
    parts = {"ppo": {"ppo_epochs": 4}, "value": {"model_name": "m"}, "value_loss_fn": {"scale": 0.4}}
    path.write_text(yaml.safe_dump({"defaults": str(SHAPES / "common.yaml"), **parts}))
    assert algorithm_of(path) == "ppo"
    found = collect_errors(path, "grpo")
    assert [name for name in parts if not any(f"unknown key {name!r}" in text for text in found)] == []
    with pytest.raises(ConfigError, match="unknown key 'ppo'"):
        load_config(path)
