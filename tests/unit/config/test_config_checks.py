"""Each rule between keys, on real files; messages show the equation and the way out."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from config_helpers import with_values

from nemo_rl.config import (
    REPOSITORY_ROOT,
    ClusterConfig,
    LoggerConfig,
    PolicyConfig,
    check_device,
    count_gpus,
    data_parallel_ranks,
    load_config,
    plan_topology,
)
from nemo_rl.config.base.names import VALIDATION_METRICS
from nemo_rl.config.rules.broken_rules import nearest_multiples
from nemo_rl.config.rules.trackers import check_trackers
from nemo_rl.experience.metrics import validation_metrics
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.utils.errors import ConfigError

NO_PACKING = "policy.sequence_packing.enabled=false"
SEPARATE = "policy.generation.colocated.enabled=false"
MEGATRON = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true")
MEGATRON_LORA = (*MEGATRON, "policy.megatron_cfg.peft.enabled=true")
DECAYS = (*MEGATRON, "policy.megatron_cfg.scheduler.lr_decay_style=cosine")
IS = "loss_fn.use_importance_sampling_correction=true"
GSPO = "loss_fn.sequence_level_importance_ratios=true"
LORA = "policy.dtensor_cfg.lora_cfg.enabled=true"
ONLY_ADAPTERS = ("policy.generation.lora_refit_mode=adapter", "policy.generation.backend=hf")


def kind(name: str) -> str:
    return f"loss_fn.truncated_importance_sampling_type={name}"


def high(value: float) -> str:
    return f"loss_fn.truncated_importance_sampling_ratio={value}"


def low(value: float) -> str:
    return f"loss_fn.truncated_importance_sampling_ratio_min={value}"


REPLAY = "policy.router_replay.enabled=true"
REFUSED: list[tuple[list[str], str]] = [
    # router replay
    (
        [
            *(REPLAY, *MEGATRON, "policy.megatron_cfg.pipeline_model_parallel_size=2"),
            "policy.megatron_cfg.activation_checkpointing=true",
        ],
        r"pipeline_model_parallel_size=2 needs policy\.megatron_cfg\.activation_checkpointing=false",
    ),
    (
        [REPLAY, *MEGATRON, "+policy.megatron_cfg.model_overrides.moe_router_fusion=true"],
        r"Remove moe_router_fusion from policy\.megatron_cfg\.model_overrides",
    ),
    # adapters alone
    ([*ONLY_ADAPTERS], r"lora_refit_mode=adapter needs adapters .*lora_cfg\.enabled=true, or set .*=merged\."),
    (
        [*ONLY_ADAPTERS, *MEGATRON_LORA],
        r"lora_refit_mode=adapter sends adapters of policy\.dtensor_cfg\.lora_cfg, .*megatron_cfg\.peft\.",
    ),
    *(
        (
            [LORA, *ONLY_ADAPTERS, f"policy.generation.backend={engine}"],
            rf"policy\.generation\.backend={engine} gets merged weights only\. Set .*backend=vllm or hf, or",
        )
        for engine in ("megatron", "sglang", "my.Engine")
    ),
    (
        [LORA, *ONLY_ADAPTERS, "policy.generation.engine.precision=fp8"],
        r"sends no weights that could be converted, and policy\.generation\.engine\.precision=fp8\. Set it to auto",
    ),
    ([LORA, *ONLY_ADAPTERS, "policy.is_vlm=true"], r"lora_refit_mode=adapter is for rows of text, and policy\.is_vlm"),
    (
        [LORA, "policy.generation.lora_refit_mode=delta"],
        r"policy\.generation\.lora_refit_mode='delta' .* is not allowed\. Allowed: merged or adapter\.",
    ),
    # batches
    (["policy.train_global_batch_size=50"], r"8 x .*8 .*\n  \(8 x 8\) / 50 = 1\.28\. .*: 32, 64\."),
    (["cluster.ranks_per_node=3"], r"3 data-parallel ranks\.\n  64 / 3 = 21\.3333\. Nearest values: 63, 66\."),
    (
        ["cluster.ranks_per_node=4", "policy.train_micro_batch_size=10", NO_PACKING],
        r"4 data-parallel ranks x 10 samples .*\n  64 / \(4 x 10\) = 1\.6\. Nearest values: 40, 80\. "
        r"Or microbatches \(policy\.train_micro_batch_size\) of 4, 8\.",
    ),
    (
        ["cluster.device=cuda", "cluster.gpus_per_node=2", "cluster.num_nodes=3"],
        r"64 / 6 = 10\.6667\. Nearest values: 60, 66\.",
    ),
    (
        ["grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=1.3"],
        r"8 x grpo\.batch_multiplier=1\.3 = 10\.4 prompts .* 1\.25\.",
    ),
    # devices
    (
        ["cluster.device=cuda", "cluster.gpus_per_node=1", SEPARATE,
         "policy.generation.colocated.resources.gpus_per_node=1"],
        r"no device is left for the policy: cluster has 1 x 1 GPUs and generation takes 1 x 1",
    ),
    (
        ["cluster.device=cuda", "cluster.gpus_per_node=2", SEPARATE],
        r"needs policy\.generation\.colocated\.resources\.gpus_per_node",
    ),
    (
        ["cluster.device=cuda", "cluster.num_nodes=2", SEPARATE],
        r"needs policy\.generation\.colocated\.resources\.num_nodes",
    ),
    (
        ["cluster.num_nodes=2", SEPARATE, "policy.generation.colocated.resources.num_nodes=2"],
        r"no device is left for the policy: cluster has 2 machines and generation takes 2 x 1\. .* cluster\.num_n",
    ),
    (
        ["cluster.num_nodes=2", "policy.generation.weight_sync.transport=shared_memory"],
        r"transport=shared_memory needs trainers and engines on the same machine, and cluster\.num_nodes=2",
    ),
    (["policy.dtensor_cfg.enabled=false"], "leaves no training backend"),
    (["policy.training_backend.name=my.Backend"], r"training_backend\.name=my\.Backend name two training backends"),
    (
        ["policy.megatron_cfg.enabled=true"],
        r"policy\.dtensor_cfg\.enabled=true and policy\.megatron_cfg\.enabled=true name two training backends\. Keep "
        r"one: set policy\.dtensor_cfg\.enabled=false or set policy\.megatron_cfg\.enabled=false\.",
    ),
    (
        ["policy.megatron_cfg.enabled=true", "policy.training_backend.name=my.Backend"],
        r"name three training backends\. Keep one: .* or leave policy\.training_backend out",
    ),
    (
        [*MEGATRON, "policy.dtensor_cfg.lora_cfg.enabled=true"],
        r"lora_cfg\.enabled=true belongs to policy\.dtensor_cfg\. .* by policy\.megatron_cfg\.peft\.enabled=true",
    ),
    (
        [*MEGATRON_LORA, "policy.megatron_cfg.peft.target_modules=[linear_qkv, k_proj]"],
        r"peft\.target_modules: 'k_proj' is no linear layer .* k_proj is a part of linear_qkv there",
    ),
    (
        [*MEGATRON_LORA, "policy.megatron_cfg.peft.exclude_modules=['*.layers.0.*', '*.mlp.gate']"],
        r"peft\.exclude_modules: '\*\.mlp\.gate' is no linear layer",
    ),
    (
        [*MEGATRON, "policy.megatron_cfg.optimizer.lr=1e-7"],
        r"megatron_cfg\.scheduler\.lr_warmup_init=5e-07 is above policy\.megatron_cfg\.optimizer\.lr=1e-07",
    ),
    (
        [*DECAYS, "policy.megatron_cfg.optimizer.min_lr=1"],
        r"megatron_cfg\.optimizer\.min_lr=1 is above .* Set it to at most 5e-06",
    ),
    ([*DECAYS, "policy.megatron_cfg.scheduler.lr_decay_iters=null"], r"cosine needs .*lr_decay_iters, the step at"),
    (
        [*DECAYS, "policy.megatron_cfg.scheduler.lr_decay_iters=13"],
        r"lr_warmup_iters=13 is not below .*lr_decay_iters=13\. Warm up for at most 12 steps, or decay for more",
    ),
    ([*MEGATRON, "policy.megatron_cfg.scheduler.end_weight_decay=0.1"], r"start_weight_decay=0\.01, end_weight_decay"),
    (
        [*MEGATRON, "policy.megatron_cfg.moe_shared_expert_overlap=true",
         "policy.megatron_cfg.moe_token_dispatcher_type=allgather"],
        r"moe_shared_expert_overlap=true needs .*=alltoall, got allgather",
    ),
    ([*MEGATRON, "policy.precision=float16"], r"policy\.precision=float16 loses gradients"),
    (
        ["policy.dtensor_cfg.enabled=false", "policy.training_backend={name: my.Backend, tensor_parallel_size: 2}"],
        r"1 ranks are no multiple of 2 \(tensor_parallel_size=2\)\. Nearest numbers of ranks: 2\.",
    ),
    (["policy.optimizer=null"], r"policy\.optimizer is null"),
    (
        ["policy.optimizer.name=torch.optim.Muon", "policy.dtensor_cfg.lora_cfg.enabled=true"],
        r"torch\.optim\.Muon with policy\.dtensor_cfg\.lora_cfg\.enabled=true: .*\.AdamW for adapters",
    ),
    (
        ["policy.optimizer.name=torch.optim.Muon", "policy.draft.enabled=true"],
        r"torch\.optim\.Muon with policy\.draft\.enabled=true: .* or policy\.draft\.enabled=false",
    ),
    (["policy.generation=null"], r"policy\.generation is null"),
    (["policy.generation.temperature=0"], r"temperature=0 makes all answers of a group equal"),
    (["policy.generation.top_k=1"], r"top_k=1 makes all answers of a group equal"),
    # lengths
    (
        ["policy.dynamic_batching.enabled=true"],
        r"sequence_packing\.enabled=true and policy\.dynamic_batching\.enabled=true exclude each other",
    ),
    (["policy.precision=float16"], r"policy.precision=float16 loses gradients .*Use bfloat16"),
    (["data.max_input_seq_length=513"], r"max_input_seq_length=513 is longer .*=512"),
    (["policy.generation.max_new_tokens=513"], r"max_new_tokens=513 is more than .*=512"),
    (["policy.generation.vllm_cfg.max_model_len=600"], r"max_model_len=600 lets the engine sample .*=512"),
    (["policy.generation.vllm_cfg.max_model_len=100"], r"max_new_tokens=512 does not fit .*max_model_len=100"),
    # grpo
    (["grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=8"], "leaves no other answer"),
    (
        ["grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=8", "grpo.adv_estimator.name=rloo",
         "grpo.use_leave_one_out_baseline=false"],
        r"name=rloo\)\. Sample at least 2 answers per prompt, or choose another estimator",
    ),
    (
        ["grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=8", "grpo.use_dynamic_sampling=true",
         "grpo.use_leave_one_out_baseline=false"],
        "drops all prompts",
    ),
    (["policy.max_total_sequence_length=1"], r"max_total_sequence_length=1 .* Allowed: int >= 2"),
    (["checkpointing.checkpoint_must_save_by=99:99:99:99"], r"checkpoint_must_save_by='99:99:99:99'"),
    (["policy.precision=float8"], r"\) is not allowed\. Allowed: bfloat16 or float16 or float32\.$"),
    (["grpo.advantage_clip_low=0.5"], r"advantage_clip_low=0\.5 .* must have 0 between"),
    (["grpo.stop_at_validation_metric=accuracy"], "early stop needs both"),
    (["grpo.adv_estimator.reward_weights=[1.0]"], "only works with grpo.adv_estimator.name=gdpo"),
    (
        ["grpo.reward_scaling.enabled=true", "grpo.reward_scaling.source_min=1"],
        r"source_min=1 must be below .*source_max=1",
    ),
    (
        ["grpo.reward_shaping.enabled=true", "grpo.reward_shaping.overlong_buffer_penalty=null"],
        "needs a value for overlong_buffer_penalty",
    ),
    # penalties and effort
    (["reward_penalties.penalize_unwanted_tokens=true"], r"needs the tokens: set .*token_ids\.unwanted"),
    (["reward_penalties.thinking_tags=['<think>']"], "must be two different texts"),
    (["reward_penalties.thinking_tags=[a, a]"], "must be two different texts"),
    (["reward_penalties.thinking_tags=[end, ended]"], "one text contains the other"),
    (["reward_penalties.token_ids={think_open: 3, think_close: 3}"], "think_open and think_close are both 3"),
    (["reward_penalties.own={empty_final_answer: {name: my.Class}}"], "is none of the built-in penalties"),
    (["reward_penalties.own={mine: {name: polite}}"], r"own\.mine\.name=polite is no dotted path"),
    (["effort_levels={low: {}, high: {}}"], r"low and effort_levels\.high give the model the same prompt"),
    (["effort_levels={low: {system_prompt: ' '}}"], r"low\.system_prompt is empty"),
    (["effort_levels={a/b: {}}"], "a name of a level"),
    (["effort_levels={low: {weight: 0}}"], r"weight=0 .* Allowed"),
    (["effort_levels={low: {over_budget_tokens: 5}}"], "over_budget_tokens has no effect without"),
    (
        ["effort_levels={low: {max_thinking_tokens: 5}}", "grpo.adv_estimator.name=gdpo"],
        r"max_thinking_tokens changes the total reward, but .*gdpo",
    ),
    # loss
    (
        ["grpo.skip_reference_policy_logprobs_calculation=true"],
        r"reference_policy_kl_penalty=0\.01 needs the reference policy",
    ),
    (
        ["loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0",
         "grpo.adv_estimator.name=reinforce_plus_plus"],
        "has no effect with loss_fn.reference_policy_kl_penalty=0",
    ),
    (["loss_fn.use_kl_in_reward=true"], r"only works with grpo\.adv_estimator\.name=reinforce_plus_plus"),
    (["loss_fn.use_cispo=true", "loss_fn.disable_ppo_ratio=true"], r"use_cispo=true shapes .* Keep one"),
    (
        ["grpo.skip_reference_policy_logprobs_calculation=true", "loss_fn.reference_policy_kl_penalty=-0.1"],
        r"reference_policy_kl_penalty=-0\.1 needs the reference policy",
    ),
    (["loss_fn.kl_input_clamp_value=-1"], r"kl_input_clamp_value=-1 .*Allowed: float >= 0 and <= 10\^9 or null"),
    (["loss_fn.positive_example_nll_weight=-0.1"], r"positive_example_nll_weight=-0\.1 .*Allowed: float >= 0"),
    (["loss_fn.use_cispo=true", "loss_fn.ratio_clip_c=3"], "no dual clip"),
    (["loss_fn.ratio_clip_c=1"], r"ratio_clip_c=1 .*Allowed: float > 1 and <= 10\^9 or null"),
    (
        ["loss_fn.force_on_policy_ratio=true", "policy.train_global_batch_size=16"],
        r"64 samples / policy\.train_global_batch_size=16 = 4 updates. Set policy\.train_global_batch_size=64",
    ),
    ([high(2.0)], "use_importance_sampling_correction, which is false"),
    ([IS, kind("tis")], r"type=tis needs .*_ratio, the upper bound"),
    ([IS, kind("icepop"), high(2.0)], r"type=icepop needs .*_ratio_min, the lower bound"),
    ([IS, kind("seq-mask-tis"), high(2.0)], r"type=seq-mask-tis needs .*_ratio_min"),
    ([IS, kind("icepop"), high(0.5), low(2.0)], r"ratio_min=2 must not exceed .*ratio=0\.5"),
    ([IS, high(2.0)], r"truncated_importance_sampling_type, which is null\. Set it to tis"),
    ([IS, low(0.5)], "truncated_importance_sampling_type, which is null"),
    ([GSPO, "loss_fn.token_level_loss=true"], r"GSPO.*Set loss_fn\.token_level_loss=false"),
    (
        [GSPO, "loss_fn.token_level_loss=false", IS, kind("seq-mask-tis"), high(2.0), low(0.5)],
        "seq-mask-tis bounds the geometric mean",
    ),
    (["loss_fn.use_cispo=true", "loss_fn.token_level_loss=false"], r"mean over tokens. Set .*token_level_loss=true"),
    (["loss_fn.use_cispo=true", "loss_fn.force_on_policy_ratio=true"], "Keep one of the two"),
    (["loss_fn.ratio_clip_max=-0.5"], "only loss_fn.use_cispo=true allows"),
    (["loss_fn.ratio_clip_max=-0.5", "loss_fn.use_cispo=true"], "below the lower one"),
    (["loss_fn.constant_sample_length=64", "loss_fn.token_level_loss=false"], "replaces the length of each answer"),
    (["grpo.adv_estimator.std_level=batch", "grpo.normalize_rewards=false"], "std_level=batch only works with"),
    (["grpo.adv_estimator.kl_to_go=true"], r"kl_to_go=true only works with loss_fn\.use_kl_in_reward=true"),
    # records of steps
    (["logger.record_modules=true"], r"adds to the records of logger\.record_steps, which is false"),
    (
        ["logger.record_steps=true", "logger.record_modules=true", "policy.dtensor_cfg.compile_layers=true"],
        r"modules inside the layers, which compiled layers do not have",
    ),
    (["logger.record_steps=true", "cluster.rollout_runners=1"], r"rollout_runners=1 keeps them elsewhere\. Use 0\."),
    (["logger.record_steps=true", *MEGATRON], r"policy\.megatron_cfg does not\. Use policy\.dtensor_cfg\."),
    (
        ["logger.record_steps=true", "cluster.ranks_per_node=2", "policy.dtensor_cfg.pipeline_parallel_size=2"],
        r"policy\.dtensor_cfg\.pipeline_parallel_size=2 divides the model into stages\. Use 1\.",
    ),
    # single keys
    (["policy.max_total_sequence_length=-1"], r"Allowed: int >= 2"),
    (["grpo.num_prompts_per_step=0"], r"greater than 0"),
    (["policy.generation.top_p=1.5"], r"Allowed: float > 0 and <= 1"),
    (["data.train.split_validation_size=1.0"], r"less than 1"),
    (["checkpointing.checkpoint_must_save_by=4h"], r"checkpoint_must_save_by='4h'"),
    # validation and data
    (["grpo.val_period=5"], r"grpo\.val_period=5 requests validation, but there is no validation data"),
    (["grpo.val_at_start=true"], r"grpo\.val_at_start=true requests validation"),
    (["data.train=null"], r"data\.train is empty"),
    (["data.train.dataset_name=null"], r"data\.train names no data"),
    (["data.train.dataset_name=ResponseDataset"], r"ResponseDataset needs data\.train\.data_path"),
    (["data.train.dataset_name=gsm9k"], r"'gsm9k' is unknown\. Did you mean 'gsm8k'\? Known: OpenMath"),
    (["data.train.data_path=a/b/c.jsonl"], r"generates its problems and cannot read"),
    (["data.train.min_operand=100"], r"min_operand=100 is above data\.train\.max_operand=99"),
    (["data.train.env_name=maths"], r"data\.train\.env_name='maths' is not in env\. Environments in env: math\."),
    (["data.train.env_name=null"], r"env_name is null"),
    # files
    (["data.train.dataset_name=null", "data.train.data_path=rows.jsonl"], r"data_path='rows\.jsonl' does not exist"),
    (["data.default.prompt_file=no.txt"], r"data\.train\.prompt_file='no\.txt' does not exist\. Looked in /"),
    (["data.default.system_prompt_file=no.txt"], r"system_prompt_file='no\.txt' does not exist"),
    (["policy.model_name=./nothing"], r"policy\.model_name='\./nothing' does not exist"),
    (["policy.tokenizer.name=a/b/c"], r"policy\.tokenizer\.name='a/b/c' does not exist"),
    (["policy.tokenizer.chat_template=no.jinja"], r"chat_template='no\.jinja' does not exist"),
]  # fmt: skip

ACCEPTED: list[list[str]] = [
    [],
    ["policy.train_global_batch_size=16"],
    ["policy.train_micro_batch_size=10"],
    ["policy.train_micro_batch_size=10", NO_PACKING, "policy.dynamic_batching.enabled=true"],
    ["cluster.ranks_per_node=2", SEPARATE, "policy.generation.colocated.resources.ranks_per_node=2"],
    ["cluster.device=cuda", "cluster.gpus_per_node=3", SEPARATE,
     "policy.generation.colocated.resources.gpus_per_node=1"],
    ["policy.generation.backend=hf", "policy.generation.vllm_cfg.max_model_len=9999"],
    ["policy.generation.top_k=-1", "policy.generation.val_temperature=0"],
    [GSPO, "loss_fn.token_level_loss=false", "loss_fn.sequence_level_kl_weight=true"],
    [IS, kind("tis"), high(2.0)],
    [IS, kind("tis"), high(2.0), low(0.5)],
    ["loss_fn.use_cispo=true", "loss_fn.ratio_clip_min=1", "loss_fn.ratio_clip_max=-0.7"],
    ["loss_fn.constant_sample_length=64", "grpo.adv_estimator.std_level=batch"],
    [IS, kind("icepop"), high(5.0), low(0.5)],
    ["loss_fn.force_on_policy_ratio=true"],
    ["loss_fn.use_kl_in_reward=true", "grpo.adv_estimator.name=reinforce_plus_plus"],
    ["grpo.reward_shaping.enabled=true"],
    ["grpo.reward_shaping.enabled=true", "grpo.reward_shaping.overlong_buffer_length=513"],
    ["grpo.reward_shaping.enabled=true", "grpo.adv_estimator.name=gdpo"],
    ["loss_fn.ratio_clip_min=1.5"],
    ["reward_penalties.penalize_unwanted_tokens=true", "reward_penalties.token_ids.unwanted=[3]"],
    ["reward_penalties.own={polite: {name: my_package.Polite, kwargs: {words: [please]}}}"],
    ["grpo.malformed_thinking_advantage=-5", "grpo.invalid_tool_call_advantage=-5"],
    ["effort_levels={low: {system_prompt: Short., max_thinking_tokens: 9, over_budget_tokens: 3}, high: {weight: 2}}"],
    ["loss_fn.kl_input_clamp_value=0", "loss_fn.kl_output_clamp_value=0"],
    ["loss_fn.reference_policy_kl_penalty=-0.01"],
    ["loss_fn.disable_ppo_ratio=true", "loss_fn.ratio_clip_c=3"],
    ["loss_fn.disable_ppo_ratio=true", GSPO, "loss_fn.token_level_loss=false"],
    ["loss_fn.positive_example_nll_weight=0.1"],
    ["grpo.reward_shaping.stop_properly_penalty_coef=0.5", "grpo.reward_shaping.enabled=true",
     "grpo.reward_shaping.overlong_buffer_length=null"],
    ["grpo.val_period=5", "data.train.split_validation_size=0.1"],
    ["data.train.dataset_name=my_package.MyDataset"],
    ["data.train.dataset_name=gsm8k"],
    ["data.train.dataset_name=null", "data.train.data_path=owner/rows"],
    ["policy.tokenizer.chat_template='{% for m in messages %}{{ m.content }}{% endfor %}'"],
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_contradictory_values_are_refused_with_advice(minimal: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_config(minimal, overrides)


@pytest.mark.parametrize("overrides", ACCEPTED, ids=lambda value: str(value)[:60])
def test_unusual_but_valid_values_load(minimal: Path, overrides: list[str]) -> None:
    load_config(minimal, overrides)


def test_all_findings_are_listed_in_one_error(minimal: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, ["grpo.val_period=5", "data.train.env_name=x", "data.train.prompt_file=no.txt"])
    assert str(caught.value).startswith("3 problems:\n- ")


def test_nearest_multiples_suggests_the_neighbouring_sizes() -> None:
    assert nearest_multiples(50, 16) == "Nearest values: 48, 64."
    assert nearest_multiples(5, 16) == "Nearest value: 16."


@pytest.mark.parametrize(
    ("cluster", "resources", "policy_ranks", "engines"),
    [
        ({"gpus_per_node": 8, "num_nodes": 2}, None, 16, 16),
        ({"gpus_per_node": 8}, {"gpus_per_node": 2}, 6, 2),
        ({"gpus_per_node": 8, "num_nodes": 4}, {"num_nodes": 1}, 24, 8),
        ({"device": "cpu", "ranks_per_node": 2}, None, 2, 2),
        ({"device": "cpu", "ranks_per_node": 2}, {"ranks_per_node": 3}, 2, 3),
        ({"device": "cpu", "ranks_per_node": 2}, {}, 2, 1),
        ({"device": "cpu", "ranks_per_node": 2, "num_nodes": 3}, {"num_nodes": 1, "ranks_per_node": 4}, 4, 4),
        ({"device": "cpu", "ranks_per_node": 2}, {"num_nodes": 1}, 2, 1),
    ],
)
def test_ranks_and_engines_are_counted_from_the_cluster(
    cluster: dict, resources: dict | None, policy_ranks: int, engines: int
) -> None:
    colocated = {"enabled": True} if resources is None else {"enabled": False, "resources": resources}
    policy = PolicyConfig.build(model_name="m", generation={"colocated": colocated})
    machines = ClusterConfig.build(**cluster)
    topology = plan_topology(machines, policy)
    assert (topology.policy_ranks, topology.generation_ranks) == (policy_ranks, engines)
    assert data_parallel_ranks(machines, policy) == policy_ranks


def test_the_device_is_checked_against_the_gpus_of_the_machine(minimal: Path, monkeypatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    check_device(load_config(minimal), 0)
    gpu = load_config(minimal, ["cluster.device=cuda", "cluster.gpus_per_node=2"])
    check_device(gpu, 2)
    with pytest.raises(ConfigError, match=r"no GPU.*--config examples/configs/grpo_math_cpu\.yaml"):
        check_device(gpu, 0)
    with pytest.raises(ConfigError, match=r"need 2 GPUs, but this machine shows 1"):
        check_device(gpu, 1)
    with pytest.raises(ConfigError, match=r"num_nodes=2, but without RAY_ADDRESS"):
        check_device(load_config(minimal, ["cluster.num_nodes=2"]), 0)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_device(gpu, 0)
    check_device(load_config(minimal, ["cluster.num_nodes=2"]), 0)


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_do_not_count(monkeypatch, hidden: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert count_gpus() == 0


WRONG_CONFIGS: dict[str, tuple[dict, list[str], str]] = {
    "mistyped key": (with_values(grpo={"num_prompt_per_step": 8}), [], "Did you mean 'grpo.num_prompts_per_step'?"),
    "batch not divisible": ({}, ["policy.train_global_batch_size=50"], "Nearest values"),
    "unknown environment": ({}, ["data.train.env_name=mathe"], "Environments in env: math"),
    "missing prompt file": ({}, ["data.default.prompt_file=prompts/none.txt"], "does not exist. Looked in"),
    "missing data file": (
        with_values(data={"train": {"data_path": "rows/none.jsonl"}}), [], "data.train.data_path='rows/none.jsonl'"),
    "negative length": ({}, ["policy.max_total_sequence_length=-128"], "Allowed: int >= 2"),
    "unknown data set": ({}, ["data.train.dataset_name=arithmetics"], "Did you mean 'arithmetic'?"),
    "bad override grammar": ({}, ["grpo.seed 3"], "It has no '='"),
    "sweep": ({}, ["grpo.seed=1,2"], "sweep"),
    "contradicting losses": ({}, ["loss_fn.use_cispo=true", "loss_fn.disable_ppo_ratio=true"], "Keep one of the two"),
    "feature not built": ({}, ["policy.quant_cfg=a.yaml"], "not built yet: quantised training"),
    "wrong type": ({}, ["grpo.num_prompts_per_step=many"], "Allowed: int > 0"),
    "no such file": ({"defaults": "nothing.yaml"}, [], "there is no file"),
}  # fmt: skip


TINY = "policy.model_name=examples/assets/tiny-chat"
ABSENT = "policy.model_name=absent/no-such-model"
WRONG_FOR_THIS_MACHINE: dict[str, tuple[list[str], dict[str, str], str]] = {
    "optimizer": ([TINY, "policy.optimizer.name=torch.optim.AdamX"], {}, "has no attribute 'AdamX'"),
    "schedule": (
        [TINY, "policy.scheduler={name: torch.optim.lr_scheduler.LinearLR, kwargs: {start: 1}}"], {},
        "policy.scheduler.kwargs do not fit torch.optim.lr_scheduler.LinearLR"),
    "environment": (
        [TINY, "+env={mine.Environment: {}}", "data.default.env_name=mine.Environment"], {},
        "environment class 'mine.Environment' cannot be imported"),
    "machines": (["cluster.num_nodes=3"], {}, "3 data-parallel ranks (cluster.num_nodes=3 x 1 on each)"),
    "stop metric": (
        ["grpo.stop_at_validation_metric=acuracy", "grpo.stop_at_validation_threshold=1"], {},
        "stop_at_validation_metric=acuracy is not a validation metric. Did you mean 'accuracy'?"),
    "transport": (["policy.generation.weight_sync.transport=cuda_ipc"], {}, "transport=cuda_ipc needs GPUs"),
    "log folder": ([TINY, "logger.log_dir=wrong.yaml/logs"], {}, "logger.log_dir='wrong.yaml/logs' cannot be written"),
    "tracker login": ([TINY, "logger.wandb_enabled=true"], {}, "logger.wandb_enabled=true needs a login"),
    "model without network": ([ABSENT], {"HF_ENDPOINT": "http://127.0.0.1:1"}, "127.0.0.1:1 could not be reached"),
    "model offline": ([ABSENT], {"HF_HUB_OFFLINE": "1"}, "and HF_HUB_OFFLINE is set"),
    "model name": (["policy.model_name='no such model!'"], {}, "neither an existing folder nor a hub id"),
    "folder without model": (["policy.model_name=examples/assets/problems"], {}, "is a folder without config.json"),
}  # fmt: skip
WRONG = {name: ([*overrides, TINY], {}, message) for name, (_, overrides, message) in WRONG_CONFIGS.items()}
IMPORTS_TORCH = ("optimizer", "schedule", "environment")


@pytest.mark.parametrize("name", [*WRONG, *WRONG_FOR_THIS_MACHINE])
def test_wrong_configs_are_refused_in_seconds_and_before_ray(write_yaml, tmp_path: Path, name: str) -> None:
    overrides, environment, message = (WRONG | WRONG_FOR_THIS_MACHINE)[name]
    path = write_yaml("wrong.yaml", WRONG_CONFIGS.get(name, ({}, [], ""))[0] or with_values())
    unset = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "HF_HUB_OFFLINE", "RAY_ADDRESS")
    clean = {key: value for key, value in os.environ.items() if key not in unset}
    clean |= {"NETRC": str(tmp_path / "netrc"), "WANDB_CONFIG_DIR": str(tmp_path), "HF_HOME": str(tmp_path)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(
        [sys.executable, REPOSITORY_ROOT / "examples/run_grpo.py", "--config", path, *overrides],
        cwd=tmp_path, env=clean | environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 2
    told, _, error = run.stderr.partition("\n\n")
    assert re.match(r"\S+ I nemo_rl \S+: reading the configuration ", told) and "Error: " in error and message in error
    assert "Ray" not in run.stderr and "Traceback" not in run.stderr
    # Processor time, which other processes lengthen least; an idle machine needs a sixth of the limit.
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < (25 if name in IMPORTS_TORCH else 9)


def test_a_tracker_needs_its_login_before_a_run(monkeypatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    wandb = LoggerConfig.build(wandb_enabled=True)
    with pytest.raises(ConfigError, match="needs a login"):
        check_trackers(wandb)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key")
    check_trackers(wandb)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.my-company.org")
    with pytest.raises(ConfigError, match="needs a login"):
        check_trackers(wandb)
    (tmp_path / "settings").write_text("[default]\nmode = offline\n")
    check_trackers(wandb)
    (tmp_path / "settings").unlink()
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(wandb)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package swanlab.*--extra swanlab"):
        check_trackers(LoggerConfig.build(swanlab_enabled=True))
    with pytest.raises(ConfigError, match=r"needs the package trackio.*--extra trackio"):
        check_trackers(LoggerConfig.build(trackio_enabled=True))
    with pytest.raises(ConfigError, match="needs the package mlflow, which is not installed"):
        check_trackers(LoggerConfig.build(mlflow_enabled=True))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=r"(?s)tracking_uri='file:runs' is a folder.*sqlite:///"):
        check_trackers(LoggerConfig.build(mlflow_enabled=True, mlflow={"tracking_uri": "file:runs"}))
    check_trackers(LoggerConfig.build(mlflow_enabled=True))


@pytest.mark.parametrize(
    ("variable", "file"),
    [
        ("SWANLAB_API_KEY", None),
        ("SWANLAB_MODE", None),
        (None, "home/.netrc"),
        (None, "here/.swanlab/.netrc"),
        (None, "here/swanlab.yaml"),
        (None, "here/.env"),
    ],
)
def test_swanlab_needs_its_login_before_a_run(
    monkeypatch, tmp_path: Path, variable: str | None, file: str | None
) -> None:
    for name in ("SWANLAB_API_KEY", "SWANLAB_MODE", "SWANLAB_SECRETS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "home"))
    monkeypatch.setenv("SWANLAB_CONFIG_DIR", str(tmp_path / "etc"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    config = LoggerConfig.build(swanlab_enabled=True)
    with pytest.raises(ConfigError, match=r"SWANLAB_API_KEY or .*home/\.netrc.*SWANLAB_MODE=offline"):
        check_trackers(config)
    if variable:
        monkeypatch.setenv(variable, "offline")
    if file:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    check_trackers(config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "val:acuracy",
            r"val:acuracy is not reported by validation\. Did you mean 'val:accuracy'\? There are val:",
        ),
        ("val:pass_k", "pass_k needs grpo.val_num_generations_per_prompt of at least 2"),
        ("val:min_weight_version", "val:min_weight_version is not reported by validation"),
    ],
)
def test_a_ranking_metric_that_no_validation_reports_is_refused(minimal: Path, name: str, message: str) -> None:
    validates = ["grpo.val_at_end=true", "data.train.split_validation_size=0.1"]
    asked = f"checkpointing.metric_name={name}"
    with pytest.raises(ConfigError, match=message):
        load_config(minimal, [asked, *validates])
    load_config(minimal, [asked, *validates, "checkpointing.enabled=false"])
    load_config(minimal, [asked, *validates[1:], "grpo.val_period=0"])


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("val:truncation_rate", []),
        ("val:my_rewards/accuracy", []),
        ("val:penalized_rate", []),
        ("val:pass_k", ["grpo.val_num_generations_per_prompt=2"]),
        ("val:min_weight_version", ["grpo.overlap.mode=ahead", "grpo.overlap.validation=hold_updates"]),
        ("train:loss", []),
    ],
)
def test_a_ranking_metric_that_validation_may_report_is_used(minimal: Path, name: str, overrides: list[str]) -> None:
    validates = ["grpo.val_at_end=true", "data.train.split_validation_size=0.1"]
    load_config(minimal, [f"checkpointing.metric_name={name}", *validates, *overrides])


def test_stop_metrics_are_those_that_validation_reports(minimal: Path) -> None:
    answer = Trajectory(0, 0, 0, "math", [], 0, reward=1.0)
    assert tuple(validation_metrics([answer], num_generations=2)) == VALIDATION_METRICS
    stop = ["grpo.stop_at_validation_threshold=1", "grpo.stop_at_validation_metric=pass_k"]
    load_config(minimal, [*stop, "grpo.val_num_generations_per_prompt=2"])
    with pytest.raises(ConfigError, match="pass_k needs grpo.val_num_generations_per_prompt of at least 2"):
        load_config(minimal, stop)
