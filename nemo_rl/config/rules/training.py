"""Check keys against each other: batches, lengths, rewards and advantages, generation, validation.

Loss options are checked here too. Paths are checked in `rules.files`, and data entries in `rules.data`.
"""

from typing import Protocol

from nemo_rl.config.base.names import PASS_K, REVIEW_METRICS, VALIDATION_METRICS, VERSION_METRICS
from nemo_rl.config.rules.broken_rules import Findings, nearest_divisors, nearest_multiples
from nemo_rl.config.rules.engines import check_device, check_engines, check_lora_refit, check_zero_mismatch
from nemo_rl.config.rules.megatron import check_engine_formats, check_fp8_training, check_offloading
from nemo_rl.config.rules.models import check_backend, check_one_layout, check_trainable
from nemo_rl.config.rules.topology import data_parallel_ranks, plan_topology
from nemo_rl.config.schema.algorithms.grpo import FROM_REWARDS, GRPOConfig
from nemo_rl.config.schema.algorithms.loss_fn import ClippedPGLossConfig
from nemo_rl.config.schema.algorithms.rollout_training import (
    RewardedTrainingConfig,
    RewardScalingConfig,
    RewardShapingConfig,
    RolloutTrainingConfig,
)
from nemo_rl.config.schema.checkpointing import CheckpointingConfig
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.data import DataConfig
from nemo_rl.config.schema.model.generation import GenerationConfig
from nemo_rl.config.schema.model.policy import PolicyConfig
from nemo_rl.utils.errors import ConfigError, did_you_mean


def check_loss(
    section: str, algorithm: RewardedTrainingConfig, policy: PolicyConfig, loss: ClippedPGLossConfig, epochs: int = 1
) -> Findings:
    """Check that loss options do not contradict each other or the run.

    Args:
        section: name of the algorithm's section.
        epochs: passes over the samples of a step.
    """
    penalty = f"loss_fn.reference_policy_kl_penalty={loss.reference_policy_kl_penalty:g}"
    if algorithm.skip_reference_policy_logprobs_calculation and loss.reference_policy_kl_penalty != 0:
        yield (
            f"{penalty} needs the reference policy, but "
            f"{section}.skip_reference_policy_logprobs_calculation=true. Set the penalty to 0 or the skip to false."
        )
    if loss.use_kl_in_reward and loss.reference_policy_kl_penalty == 0:
        yield f"loss_fn.use_kl_in_reward=true has no effect with {penalty}. Give the penalty a weight."
    samples = algorithm.num_prompts_per_step * algorithm.num_generations_per_prompt
    updates = samples // policy.train_global_batch_size
    if loss.force_on_policy_ratio and updates * epochs > 1:
        passes, one = (f" x {section}.ppo_epochs={epochs}", f" and {section}.ppo_epochs=1") if epochs > 1 else ("", "")
        yield (
            "loss_fn.force_on_policy_ratio=true needs one optimizer update per step, but "
            f"{samples} samples / policy.train_global_batch_size={policy.train_global_batch_size}{passes} = "
            f"{updates * epochs} updates. Set policy.train_global_batch_size={samples}{one}."
        )
    yield from check_loss_options(loss)


def check_loss_options(loss: ClippedPGLossConfig) -> Findings:
    """Check that the options of one loss do not contradict each other."""
    yield from _check_ratio(loss)
    yield from _check_sequences(loss)
    yield from _check_importance_sampling(loss)


def _check_ratio(loss: ClippedPGLossConfig) -> Findings:
    if loss.disable_ppo_ratio and loss.use_cispo:
        yield (
            "loss_fn.use_cispo=true shapes the probability ratio, which loss_fn.disable_ppo_ratio=true removes. "
            "Keep one of the two."
        )
    if loss.use_cispo and loss.ratio_clip_c is not None:
        yield "loss_fn.use_cispo=true has no dual clip. Set loss_fn.ratio_clip_c=null."
    if loss.use_cispo and loss.force_on_policy_ratio:
        yield (
            "loss_fn.use_cispo=true clips the ratio that loss_fn.force_on_policy_ratio=true takes as 1. "
            "Keep one of the two."
        )
    if loss.ratio_clip_max < 0 and not loss.use_cispo:
        yield (
            f"loss_fn.ratio_clip_max={loss.ratio_clip_max:g} puts the upper bound of the ratio below 1, which only "
            "loss_fn.use_cispo=true allows. Give a value of at least 0."
        )
    if loss.ratio_clip_max < -loss.ratio_clip_min:
        yield (
            f"loss_fn.ratio_clip_max={loss.ratio_clip_max:g} and loss_fn.ratio_clip_min={loss.ratio_clip_min:g} put "
            "the upper bound of the ratio below the lower one. Raise one of them, for example ratio_clip_min=1."
        )


def _check_sequences(loss: ClippedPGLossConfig) -> Findings:
    """Check that the loss averages over tokens or sequences, as the level of the ratio requires."""
    if loss.sequence_level_importance_ratios and loss.token_level_loss:
        yield (
            "loss_fn.sequence_level_importance_ratios=true (GSPO) gives every sequence one ratio, so its loss is a "
            "mean over sequences. Set loss_fn.token_level_loss=false."
        )
    if loss.use_cispo and not loss.token_level_loss:
        yield "loss_fn.use_cispo=true is a mean over tokens. Set loss_fn.token_level_loss=true."
    if loss.constant_sample_length is not None and not loss.token_level_loss:
        yield (
            f"loss_fn.constant_sample_length={loss.constant_sample_length:g} replaces the length of each answer, by "
            "which loss_fn.token_level_loss=false divides. Set loss_fn.token_level_loss=true."
        )


def _check_importance_sampling(loss: ClippedPGLossConfig) -> Findings:
    kind = loss.truncated_importance_sampling_type
    low = loss.truncated_importance_sampling_ratio_min
    high = loss.truncated_importance_sampling_ratio
    has_bounds = low is not None or high is not None
    if (kind or has_bounds) and not loss.use_importance_sampling_correction:
        yield (
            "loss_fn.truncated_importance_sampling_* bounds the weights of "
            "loss_fn.use_importance_sampling_correction, which is false. Set it to true or the bounds "
            "to null."
        )
    if kind is None and has_bounds:
        yield (
            f"loss_fn.truncated_importance_sampling_ratio={high} and _ratio_min={low} are bounds of "
            "loss_fn.truncated_importance_sampling_type, which is null. Set it to tis, icepop or seq-mask-tis."
        )
    if kind is not None and high is None:
        yield (
            f"loss_fn.truncated_importance_sampling_type={kind} needs "
            "loss_fn.truncated_importance_sampling_ratio, the upper bound, for example 2.0."
        )
    if kind in ("icepop", "seq-mask-tis") and low is None:
        yield (
            f"loss_fn.truncated_importance_sampling_type={kind} needs "
            "loss_fn.truncated_importance_sampling_ratio_min, the lower bound, for example 0.5."
        )
    if kind == "seq-mask-tis" and loss.sequence_level_importance_ratios:
        yield (
            "loss_fn.truncated_importance_sampling_type=seq-mask-tis bounds the geometric mean of token weights, but "
            "loss_fn.sequence_level_importance_ratios=true gives a sequence one weight. Use tis or icepop."
        )
    if low is not None and high is not None and low > high:
        yield (
            f"loss_fn.truncated_importance_sampling_ratio_min={low:g} must not exceed "
            f"loss_fn.truncated_importance_sampling_ratio={high:g}."
        )


def check_batches(
    section: str, algorithm: RolloutTrainingConfig, policy: PolicyConfig, cluster: ClusterConfig
) -> Findings:
    """Check that rollouts can be divided into updates, and updates into the ranks and microbatches of `cluster`."""
    topology = plan_topology(cluster, policy)
    if topology.policy_ranks < 1:
        yield (
            "no device is left for the policy: "
            f"cluster has {_machines(cluster)} "
            f"and generation takes {topology.generation_nodes} x {topology.generation_ranks_per_node}."
            " Lower policy.generation.colocated.resources or raise "
            f"cluster.{'gpus_per_node' if cluster.uses_gpu else 'num_nodes'}."
        )
        return
    prompts, answers = algorithm.num_prompts_per_step, algorithm.num_generations_per_prompt
    batch, samples = policy.train_global_batch_size, prompts * answers
    if samples % batch:
        yield (
            f"{section}.num_prompts_per_step={prompts} x {section}.num_generations_per_prompt={answers} samples "
            f"do not divide into policy.train_global_batch_size={batch}.\n"
            f"  ({prompts} x {answers}) / {batch} = {samples / batch:g}. "
            f"Nearest values of policy.train_global_batch_size: {nearest_divisors(batch, samples)}."
        )
    yield from check_shards(policy, cluster)


def _machines(cluster: ClusterConfig) -> str:
    return (
        f"{cluster.num_nodes} x {cluster.gpus_per_node} GPUs" if cluster.uses_gpu else f"{cluster.num_nodes} machines"
    )


def check_shards(policy: PolicyConfig, cluster: ClusterConfig) -> Findings:
    """Check that ranks and microbatches divide an update, and that Megatron Core can save the optimizer."""
    yield from check_offloading("policy", policy, cluster)
    yield from check_fp8_training("policy", policy, cluster)
    topology = plan_topology(cluster, policy)
    try:
        ranks = data_parallel_ranks(cluster, policy)
    except ConfigError as error:
        yield str(error)
        return
    nodes, each = topology.policy_nodes, topology.policy_ranks_per_node
    which = f" (cluster.num_nodes={nodes} x {each} on each)" if nodes > 1 else ""
    batch, micro = policy.train_global_batch_size, policy.train_micro_batch_size
    packing, dynamic = policy.sequence_packing.enabled, policy.dynamic_batching.enabled
    flexible = packing or dynamic or policy.invariant_gradients
    step = ranks if flexible else ranks * micro
    if batch % step == 0:
        return
    name = f"policy.train_global_batch_size={batch}"
    if flexible:
        yield (
            f"{name} does not divide into {ranks} data-parallel ranks{which}.\n"
            f"  {batch} / {ranks} = {batch / ranks:g}. {nearest_multiples(batch, step)}"
        )
    else:
        yield (
            f"{name} does not divide into {ranks} data-parallel rank{'s' * (ranks > 1)}{which} x {micro} "
            "samples per microbatch (policy.train_micro_batch_size).\n"
            f"  {batch} / ({ranks} x {micro}) = {batch / step:g}. {nearest_multiples(batch, step)}"
            f"{_fitting_micro(policy, ranks)}"
        )


def _fitting_micro(policy: PolicyConfig, ranks: int) -> str:
    """Return advice on microbatch sizes that divide the global batch, or an empty text."""
    batch, micro = policy.train_global_batch_size, policy.train_micro_batch_size
    if batch % ranks:
        return ""
    return f" Or microbatches (policy.train_micro_batch_size) of {nearest_divisors(micro, batch // ranks)}."


def check_lengths(policy: PolicyConfig, data: DataConfig) -> Findings:
    """Check that answers, prompts and token budgets fit the sequence length."""
    total = policy.max_total_sequence_length
    limit = f"policy.max_total_sequence_length={total}"
    yield from check_one_layout("policy", policy)
    if data.max_input_seq_length is not None and data.max_input_seq_length > total:
        yield (
            f"data.max_input_seq_length={data.max_input_seq_length} is longer than {limit}. "
            f"Set data.max_input_seq_length to at most {total}."
        )
    if policy.generation is not None:
        yield from _check_answer_lengths(policy.generation, total)


def _check_answer_lengths(generation: GenerationConfig, total: int) -> Findings:
    new_tokens, context = generation.max_new_tokens, generation.engine.max_model_len
    if new_tokens > total:
        yield (
            f"policy.generation.max_new_tokens={new_tokens} is more than "
            f"policy.max_total_sequence_length={total}. Set it to at most {total}, or raise the total."
        )
    if generation.backend not in ("vllm", "sglang"):
        return
    if context > total:
        yield (
            f"policy.generation.engine.max_model_len={context} lets the engine sample sequences longer "
            f"than policy.max_total_sequence_length={total}. Set both to the same value."
        )
    elif new_tokens > context:
        yield (
            f"policy.generation.max_new_tokens={new_tokens} does not fit into "
            f"policy.generation.engine.max_model_len={context}. Set it to at most {context}."
        )


def check_grpo(grpo: GRPOConfig) -> Findings:
    """Check that the group is large enough for the baseline, and the keys that GRPO shares."""
    group = f"grpo.num_generations_per_prompt={grpo.num_generations_per_prompt}"
    estimator = grpo.adv_estimator
    if grpo.num_generations_per_prompt == 1:
        leave_one_out = estimator.name == "grpo" and estimator.use_leave_one_out_baseline
        if leave_one_out or estimator.name == "rloo":
            other = "set grpo.use_leave_one_out_baseline=false" if leave_one_out else "choose another estimator"
            yield (
                f"{group} leaves no other answer for a baseline without the sample's own reward "
                f"(grpo.adv_estimator.name={estimator.name}). Sample at least 2 answers per prompt, or {other}."
            )
    yield from check_rewards("grpo", grpo)


def check_rewards(section: str, algorithm: RewardedTrainingConfig) -> Findings:
    """Check that group size, dynamic sampling and the keys of rewards fit together."""
    prompts, answers = algorithm.num_prompts_per_step, algorithm.num_generations_per_prompt
    if algorithm.use_dynamic_sampling and answers == 1:
        yield (
            f"{section}.num_generations_per_prompt={answers} makes every group's rewards equal, so "
            f"{section}.use_dynamic_sampling=true drops all prompts. Sample at least 2 answers per prompt."
        )
    drawn = prompts * algorithm.batch_multiplier
    if algorithm.use_dynamic_sampling and drawn != int(drawn):
        yield (
            f"{section}.num_prompts_per_step={prompts} x {section}.batch_multiplier={algorithm.batch_multiplier:g} = "
            f"{drawn:g} prompts is not a whole number. Choose a multiplier such as "
            f"{round(drawn) / prompts:g}."
        )
    yield from check_reward_scaling(algorithm.reward_scaling, section)
    yield from check_reward_shaping(algorithm.reward_shaping, section)


def check_advantages(grpo: GRPOConfig, loss: ClippedPGLossConfig) -> Findings:
    """Check that options of the advantage estimator belong to the chosen estimator."""
    estimator = grpo.adv_estimator
    low, high = grpo.advantage_clip_low, grpo.advantage_clip_high
    if (low is not None and low > 0) or (high is not None and high < 0):
        yield (
            f"grpo.advantage_clip_low={low} and grpo.advantage_clip_high={high} must have 0 between "
            "them, the advantage of an average answer. Give low <= 0 <= high, or null."
        )
    if estimator.reward_weights is not None and estimator.name != "gdpo":
        yield "grpo.adv_estimator.reward_weights only works with grpo.adv_estimator.name=gdpo."
    if estimator.std_level == "batch" and (estimator.name != "grpo" or not estimator.normalize_rewards):
        yield (
            "grpo.adv_estimator.std_level=batch only works with grpo.adv_estimator.name=grpo and "
            f"normalize_rewards=true, got {estimator.name} and {str(estimator.normalize_rewards).lower()}."
        )
    if loss.use_kl_in_reward and estimator.name != "reinforce_plus_plus":
        yield (
            "loss_fn.use_kl_in_reward=true only works with grpo.adv_estimator.name=reinforce_plus_plus, "
            f"got {estimator.name}."
        )
    if estimator.kl_to_go and not loss.use_kl_in_reward:
        yield "grpo.adv_estimator.kl_to_go=true only works with loss_fn.use_kl_in_reward=true."
    yield from _check_turn_credit(grpo)
    yield from _check_one_ratio(grpo, loss)


def _check_one_ratio(grpo: GRPOConfig, loss: ClippedPGLossConfig) -> Findings:
    """Refuse one ratio per sequence for advantages that differ between tokens, because it would average them."""
    one_ratio = loss.sequence_level_importance_ratios and not (loss.force_on_policy_ratio or loss.disable_ppo_ratio)
    estimator = grpo.adv_estimator
    differs = {"name=opd": estimator.name == "opd", "credit=step_rewards": estimator.credit == "step_rewards"}
    for key in (key for key, holds in differs.items() if one_ratio and holds):
        yield (
            "loss_fn.sequence_level_importance_ratios=true (GSPO) gives every answer one ratio, so that only the mean "
            f"of its advantages would count, but grpo.adv_estimator.{key} gives tokens their own. Set "
            "loss_fn.sequence_level_importance_ratios=false."
        )


def _check_turn_credit(grpo: GRPOConfig) -> Findings:
    """Check that advantages per turn have an estimator that supports them, and rewards of turns."""
    estimator = grpo.adv_estimator
    if estimator.credit == "episode":
        if estimator.turn_discount != 1.0:
            yield (
                f"grpo.adv_estimator.turn_discount={estimator.turn_discount:g} only works with "
                "grpo.adv_estimator.credit=turn_returns, turn_rewards or step_rewards, got episode."
            )
        return
    key = f"grpo.adv_estimator.credit={estimator.credit}"
    if estimator.name not in FROM_REWARDS:
        yield f"{key} only works with grpo.adv_estimator.name={', '.join(FROM_REWARDS)}, got {estimator.name}."
    if grpo.reward_scaling.enabled:
        yield (
            f"{key} uses the rewards of turns, which grpo.reward_scaling does not change. Set "
            "grpo.reward_scaling.enabled=false, and scale the rewards in the environment."
        )
    leaves_one_out = estimator.name == "rloo" or (estimator.name == "grpo" and estimator.use_leave_one_out_baseline)
    if estimator.credit == "step_rewards" and leaves_one_out:
        yield (
            f"{key} compares each step with all steps of the group, also with those of its own sample. Set "
            "grpo.use_leave_one_out_baseline=false, and grpo.adv_estimator.name=grpo or dr_grpo."
        )


def check_early_stop(section: str, algorithm: RolloutTrainingConfig) -> Findings:
    """Check that a metric that ends the run exists and has a threshold."""
    metric, threshold = algorithm.stop_at_validation_metric, algorithm.stop_at_validation_threshold
    known = _validation_metrics(algorithm)
    if metric is not None and metric not in known:
        yield (
            f"{section}.stop_at_validation_metric={metric} is not a validation metric."
            f"{_hint(metric, known, section)} There are {', '.join(known)}."
        )
    if (metric is None) != (threshold is None):
        yield (
            f"early stop needs both {section}.stop_at_validation_metric and {section}.stop_at_validation_threshold; "
            f"got {metric} and {threshold}."
        )


def check_ranking_metric(
    section: str, algorithm: RolloutTrainingConfig, checkpointing: CheckpointingConfig, data: DataConfig
) -> Findings:
    """Check that validation reports the metric that ranks checkpoints, if this is known before the run.

    Metrics of an environment or a data set have its name and a slash. They are known only when they are reported.
    """
    side, _, metric = (checkpointing.metric_name or "").partition(":")
    is_known_later = "/" in metric or metric.startswith(REVIEW_METRICS)
    if not checkpointing.enabled or side != "val" or is_known_later or not _validates(algorithm, data):
        return
    names = [*_validation_metrics(algorithm), *(VERSION_METRICS if algorithm.overlap.validation != "stop" else ())]
    if metric not in names:
        known = [f"val:{name}" for name in names]
        yield (
            f"checkpointing.metric_name=val:{metric} is not reported by validation."
            f"{_hint(f'val:{metric}', known, section)} There are {', '.join(known)}, and val:<environment>/<name>."
        )


def _validation_metrics(algorithm: RolloutTrainingConfig) -> list[str]:
    several = algorithm.val_num_generations_per_prompt > 1
    return [name for name in VALIDATION_METRICS if several or name != PASS_K]


def _hint(metric: str, known: list[str], section: str) -> str:
    if metric.removeprefix("val:") == PASS_K:
        return f" {PASS_K} needs {section}.val_num_generations_per_prompt of at least 2."
    return did_you_mean(metric, known)


def check_reward_scaling(scaling: RewardScalingConfig, section: str = "grpo") -> Findings:
    """Check that the source range is not empty."""
    if scaling.enabled and scaling.source_min >= scaling.source_max:
        yield (
            f"{section}.reward_scaling.source_min={scaling.source_min:g} must be below "
            f"{section}.reward_scaling.source_max={scaling.source_max:g}."
        )


def check_reward_shaping(shaping: RewardShapingConfig, section: str = "grpo") -> Findings:
    """Check that the values of the chosen penalty are set."""
    if not shaping.enabled or shaping.stop_properly_penalty_coef is not None:
        return
    needed = ("max_response_length", "overlong_buffer_length", "overlong_buffer_penalty")
    empty = [key for key in needed if getattr(shaping, key) is None]
    if empty:
        yield (
            f"{section}.reward_shaping.enabled=true needs a value for {', '.join(empty)}, or "
            f"{section}.reward_shaping.stop_properly_penalty_coef instead."
        )


def check_generation(policy: PolicyConfig, cluster: ClusterConfig) -> Findings:
    """Check that training and generation each have a backend and devices."""
    yield from check_backend("policy", policy)
    yield from check_trainable(policy)
    yield from check_zero_mismatch(policy, cluster)
    yield from check_lora_refit(policy)
    yield from check_device(policy, cluster)
    generation = policy.generation
    if policy.reward_model_cfg.enabled:
        yield "policy.reward_model_cfg.enabled=true makes a model that cannot sample answers. Set it to false."
    if generation is None:
        yield "policy.generation is null, but the policy samples answers. Write a policy.generation section."
        return
    greedy = generation.greedy_choice
    if greedy is not None:
        yield (
            f"policy.generation.{greedy} makes all answers of a group equal, so nothing can be learned. Use "
            "temperature=1.0 and top_k=null, and policy.generation.val_temperature=0 for greedy validation."
        )
    yield from _check_logprobs_mode(generation)
    yield from check_engine_formats(policy, cluster)
    yield from _check_transport(generation, cluster)
    topology = plan_topology(cluster, policy)
    counts = [topology.generation_ranks_per_node] * topology.generation_nodes
    yield from check_engines("policy.generation", generation, counts, _ranks_keys(generation, cluster))
    resources = generation.colocated.resources
    if generation.colocated.enabled or not cluster.uses_gpu:
        return
    key = "gpus_per_node" if cluster.num_nodes == 1 else "num_nodes"
    if getattr(resources, key) is None:
        yield (
            "policy.generation.colocated.enabled=false needs "
            f"policy.generation.colocated.resources.{key}: how many of the cluster's devices generate."
        )


def _ranks_keys(generation: GenerationConfig, cluster: ClusterConfig) -> str:
    """Return the keys that set the number of generating machines and of the ranks on each."""
    key = "gpus_per_node" if cluster.uses_gpu else "ranks_per_node"
    if generation.colocated.enabled:
        way_out = "" if cluster.uses_gpu else ", or policy.generation.colocated.enabled=false for separate processes"
        return f"cluster.{key}, cluster.num_nodes{way_out}"
    resources = "policy.generation.colocated.resources"
    return f"{resources}.{key}, {resources}.num_nodes"


def _check_logprobs_mode(generation: GenerationConfig) -> Findings:
    """Check that the engine's log-probabilities belong to the sampled distribution."""
    changed = [
        f"{key}={value}"
        for key, value, unchanged in (
            ("temperature", generation.temperature, (1.0,)),
            ("top_p", generation.top_p, (1.0,)),
            ("top_k", generation.top_k, (None, -1)),
            ("bad_words", generation.bad_words, (None, [])),
        )
        if value not in unchanged
    ]
    if generation.vllm_cfg.logprobs_mode == "raw_logprobs" and changed:
        yield (
            "policy.generation.vllm_cfg.logprobs_mode=raw_logprobs reports other log-probs than those of the sampled "
            f"distribution with policy.generation.{changed[0]}, so importance ratios would be wrong. Set it to "
            "processed_logprobs."
        )
    filters = [change for change in changed if change.startswith("top_")]
    if generation.backend == "sglang" and filters:
        yield (
            f"policy.generation.backend=sglang reports log-probs without policy.generation.{filters[0]}, so importance "
            "ratios would be wrong. Take it away, or use policy.generation.backend=vllm; val_top_p and val_top_k may "
            "stay."
        )


def _check_transport(generation: GenerationConfig, cluster: ClusterConfig) -> Findings:
    """Check that the configured transport can send weights to all engines, including those that join during the run."""
    asked, colocated = generation.weight_sync.transport, generation.colocated.enabled
    if asked == "cuda_ipc" and not (cluster.uses_gpu and colocated):
        yield (
            "policy.generation.weight_sync.transport=cuda_ipc needs GPUs and "
            "policy.generation.colocated.enabled=true. Use auto."
        )
    if not generation.weight_sync.recompute_kv_cache and generation.backend not in ("vllm", "sglang"):
        yield (
            "policy.generation.weight_sync.recompute_kv_cache=false works with the backends vllm and sglang only; "
            f"the backend {generation.backend} always computes keys and values again. Set it to true."
        )
    if asked == "shared_memory" and cluster.num_nodes > 1:
        yield (
            f"policy.generation.weight_sync.transport=shared_memory needs trainers and engines on the same machine, "
            f"and cluster.num_nodes={cluster.num_nodes}. Use auto or collective."
        )
    if generation.num_engines_file and colocated and cluster.uses_gpu:
        yield (
            f"policy.generation.num_engines_file={generation.num_engines_file} lets engines join while the policy "
            "trains, and with policy.generation.colocated.enabled=true they share its GPUs. Give the engines GPUs of "
            "their own: policy.generation.colocated.enabled=false."
        )


class ValidationCadence(Protocol):
    """Interface of an algorithm's section with keys that configure validation."""

    val_period: int
    val_at_start: bool
    val_at_end: bool


def check_validation(section: str, cadence: ValidationCadence, data: DataConfig) -> Findings:
    """Check that there is validation data if validation is configured."""
    wanted = [
        f"{section}.{key}={str(value).lower()}"
        for key, value in (
            ("val_period", cadence.val_period),
            ("val_at_start", cadence.val_at_start),
            ("val_at_end", cadence.val_at_end),
        )
        if value > 0
    ]
    if wanted and data.train_entries and not data.validation_entries and not _splits(data):
        yield (
            f"{wanted[0]} requests validation, but there is no validation data. Set data.validation, or "
            f"data.train.split_validation_size=0.05, or switch validation off ({wanted[0].split('=')[0]}="
            f"{'0' if 'period' in wanted[0] else 'false'})."
        )


def _validates(cadence: ValidationCadence, data: DataConfig) -> bool:
    """Return whether a run validates on data of its configuration."""
    is_wanted = cadence.val_period > 0 or cadence.val_at_start or cadence.val_at_end
    return is_wanted and (bool(data.validation_entries) or _splits(data))


def _splits(data: DataConfig) -> bool:
    return any(entry.split_validation_size > 0 for entry in data.train_entries)
