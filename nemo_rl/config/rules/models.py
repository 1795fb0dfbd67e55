"""Check the sections of a run's models, and the models besides the policy.

The checks of a section concern its backend, the keys that training needs, and its microbatches. Models besides the
policy are teachers, critics and models that reward answers. Their checks concern devices and lengths; the keys of
teachers are in `rules.teachers`.

For a policy that reads images, combinations that are not proven equal to transformers are refused by name.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.rules.engines import check_invariant_gradients
from nemo_rl.config.rules.megatron import check_megatron, check_megatron_schedule
from nemo_rl.config.rules.topology import Role, divide_cluster, model_ranks, parallel_sizes, without_devices
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.judges import JudgeEngineConfig, RewardModelEnvironmentConfig
from nemo_rl.config.schema.model.policy import PolicyConfig
from nemo_rl.files.trusted_code import trust_code
from nemo_rl.utils.errors import ConfigError


def check_backend(section: str, policy: PolicyConfig) -> Findings:
    """Check that exactly one backend of `section` is enabled."""
    own, sections = policy.training_backend, ("dtensor_cfg", "megatron_cfg")
    asked = [f"{section}.{name}.enabled=true" for name in sections if getattr(policy, name).enabled]
    asked += [f"{section}.training_backend.name={own.name}"] if own is not None else []
    if not asked:
        yield (
            f"{section}.dtensor_cfg.enabled=false leaves no training backend. Set it or {section}.megatron_cfg.enabled "
            f"to true, or name your own backend: {section}.training_backend.name."
        )
    if len(asked) > 1:
        others = [
            f"set {each.replace('true', 'false')}" if each.endswith("true") else f"leave {section}.training_backend out"
            for each in asked
        ]
        yield (
            f"{' and '.join(asked)} name {'two' if len(asked) == 2 else 'three'} training backends. Keep one: "
            f"{' or '.join(others)}."
        )
    if policy.megatron_cfg.enabled:
        yield from check_megatron(section, policy.megatron_cfg)
    if policy.router_replay.enabled:
        yield from _check_router_replay(section, policy)
    if policy.megatron_cfg.enabled and policy.dtensor_cfg.lora_cfg.enabled:
        yield (
            f"{section}.dtensor_cfg.lora_cfg.enabled=true belongs to {section}.dtensor_cfg. Set it to false; adapters "
            f"of Megatron Core are enabled by {section}.megatron_cfg.peft.enabled=true."
        )


def _check_router_replay(section: str, policy: PolicyConfig) -> Findings:
    """Check that engines sample from the model, and that its backend can replay their choice of experts."""
    key, advice = f"{section}.router_replay.enabled=true", f"Set {section}.router_replay.enabled=false."
    if section != "policy":
        yield f"{key}: engines choose the experts of the policy's tokens, not those of the {section}. {advice}"
    elif policy.generation is None:
        yield f"{key} needs engines whose choice of experts is replayed, but this run samples no answers. {advice}"
    if policy.training_backend is not None:
        yield f"{key} is built for dtensor_cfg and megatron_cfg, not for {section}.training_backend. {advice}"
    elif policy.megatron_cfg.enabled:
        stages, recomputes = (
            policy.megatron_cfg.pipeline_model_parallel_size,
            policy.megatron_cfg.activation_checkpointing,
        )
        if stages > 1 and recomputes:
            yield (
                f"{key} with {section}.megatron_cfg.pipeline_model_parallel_size={stages} needs "
                f"{section}.megatron_cfg.activation_checkpointing=false: a layer that is computed again while other "
                "microbatches are under way would get their experts. Set one of the two, or use one stage."
            )
        if policy.megatron_cfg.model_overrides.get("moe_router_fusion"):
            yield (
                f"{key} cannot replace the choice of a fused kernel. Remove moe_router_fusion from "
                f"{section}.megatron_cfg.model_overrides."
            )


def check_trainable(policy: PolicyConfig, section: str = "policy") -> Findings:
    """Check that a trained model has an optimizer and a number format for small gradients."""
    if policy.megatron_cfg.enabled:
        yield from check_megatron_schedule(section, policy.megatron_cfg)
    elif policy.optimizer is None:
        yield (
            f"{section}.optimizer is null, but the {section} is trained. Name an optimizer, for example "
            "torch.optim.AdamW."
        )
    elif policy.optimizer.is_muon:
        yield from _check_muon(policy, section)
    yield from _check_finite(policy, section)
    yield from check_invariant_gradients(section, policy)
    if policy.precision == "float16":
        yield (
            f"{section}.precision=float16 loses gradients below 6e-8, and there is no loss scaling that would save "
            "them. Use bfloat16, which has the range of float32, or float32."
        )


def _check_muon(policy: PolicyConfig, section: str) -> Findings:
    """Check that Muon gets whole matrices of the model itself."""
    advice = f"Set {section}.optimizer.name=torch.optim.AdamW"
    if policy.dtensor_cfg.lora_cfg.enabled:
        yield (
            f"{section}.optimizer.name=torch.optim.Muon with {section}.dtensor_cfg.lora_cfg.enabled=true: Muon makes "
            "updates of whole matrices orthogonal; for the factors of adapters no such rule is established. "
            f"{advice} for adapters, or train the whole model."
        )
    if policy.draft.enabled:
        yield (
            f"{section}.optimizer.name=torch.optim.Muon with {section}.draft.enabled=true: a draft model is trained "
            f"with the policy's single learning rate, and Muon has two. {advice}, or {section}.draft.enabled=false."
        )


def _check_finite(policy: PolicyConfig, section: str) -> Findings:
    """Check that the numbers among the arguments of optimizer and schedule are finite."""
    written = policy.model_dump(include={"optimizer", "scheduler"})
    for key, value in _numbers(written, section):
        if not math.isfinite(value):
            yield f"{key}={value} is not finite, and would make every weight infinite or NaN. Write a finite number."


def _numbers(value: Any, key: str) -> Iterator[tuple[str, float]]:
    """Yield all floats at and below a value with their dotted keys."""
    if isinstance(value, float):
        yield key, value
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, below in items:
        yield from _numbers(below, f"{key}.{name}")


def check_one_layout(section: str, model: PolicyConfig) -> Findings:
    """Check that packing and dynamic batching are not both on."""
    packing, dynamic = model.sequence_packing, model.dynamic_batching
    if packing.enabled and dynamic.enabled:
        yield (
            f"{section}.sequence_packing.enabled=true and {section}.dynamic_batching.enabled=true exclude each "
            f"other. Switch one off, for example {section}.sequence_packing.enabled=false."
        )


def check_placements(models: Mapping[str, Role], cluster: ClusterConfig) -> Findings:
    """Check that every model but the policy has devices. Without them, other rules cannot divide the cluster.

    Args:
        models: the models of the run, by the name of their section.
    """
    for name in models:
        if name != "policy":
            yield from _check_placement(name, models, cluster)


def check_second_models(models: Mapping[str, Role], cluster: ClusterConfig) -> Findings:
    """Check devices, backend, sequence length and training keys of every model but the policy.

    Args:
        models: the models of the run, by the name of their section.
    """
    misplaced = list(check_placements(models, cluster))
    yield from misplaced
    longest = models["policy"].section.max_total_sequence_length
    for name, role in models.items():
        if name == "policy":
            continue
        yield from check_backend(name, role.section)
        if role.section.max_total_sequence_length < longest:
            yield (
                f"{name}.max_total_sequence_length={role.section.max_total_sequence_length} is less than "
                f"policy.max_total_sequence_length={longest}: the {name} could not read the longest answers. "
                "Set both to the same value."
            )
        yield from check_one_layout(name, role.section)
    if not misplaced:
        yield from _check_updates(models, cluster)


def _check_placement(name: str, models: Mapping[str, Role], cluster: ClusterConfig) -> Findings:
    """Check that the model that shares its devices exists, or that the cluster has devices left for this model."""
    role, others = models[name], [other for other in models if other != name]
    host = role.shares_with
    if host is not None:
        if host not in others:
            yield f"{name}.colocated.with_model={host} is no other model of the run. There are: {', '.join(others)}."
        elif host != "policy" and models[host].shares_with is not None:
            yield (
                f"{name}.colocated.with_model={host}, and {host} uses the devices of {models[host].shares_with}. Set "
                f"{name}.colocated.with_model={models[host].shares_with}."
            )
        return
    if not cluster.uses_gpu:
        return
    key, resources = "gpus_per_node" if cluster.num_nodes == 1 else "num_nodes", role.section.placement.resources
    if getattr(resources, key) is None:
        yield (
            f"{name}.colocated.enabled=false needs {name}.colocated.resources.{key}: how many of the cluster's "
            f"devices the {name} has."
        )
        return
    left = divide_cluster(cluster, models)["policy"]
    if left.num_nodes < 1 or left.gpus_per_node < 1:
        yield (
            f"{name}.colocated.resources.{key}={getattr(resources, key)} leaves no device for the policy: "
            f"cluster has {cluster.num_nodes} x {cluster.gpus_per_node} GPUs. Lower it, or set "
            f"{name}.colocated.enabled=true."
        )


def _check_updates(models: Mapping[str, Role], cluster: ClusterConfig) -> Findings:
    """Check that each trained model but the policy has an optimizer, and a batch size that its ranks divide."""
    for name, ranks in model_ranks(cluster, models).items():
        role = models[name]
        if name == "policy" or not role.trains or ranks < 1:
            continue
        yield from check_trainable(role.section, name)
        try:
            sizes = parallel_sizes(role.section, ranks)
        except ConfigError as error:
            yield f"{name}: {error}"
            continue
        shards, batch = sizes["dp_replicate"] * sizes["dp_shard"], role.section.train_global_batch_size
        if batch % shards:
            yield (
                f"{name}.train_global_batch_size={batch} does not divide into {shards} data-parallel ranks. "
                f"Set a multiple of {shards}."
            )


type Judges = Mapping[str, RewardModelEnvironmentConfig | JudgeEngineConfig]
"""Sections of models that reward answers on their own devices, by their place in the configuration."""


def left_by_judges(cluster: ClusterConfig, judges: Judges) -> ClusterConfig:
    """Return the part of a cluster that judges leave to the run's models, or all of it if judges have wrong devices."""
    if any(check_judges(judges, cluster)):
        return cluster
    for judge in judges.values():
        cluster = without_devices(cluster, judge.resources)
    return cluster


def check_judges(judges: Judges, cluster: ClusterConfig) -> Findings:
    """Check that judges are enabled, have one layout, do not run in rollout runners, and have devices."""
    for place, judge in judges.items():
        if isinstance(judge, RewardModelEnvironmentConfig):
            yield from _check_scoring_model(place, judge)
        if cluster.rollout_runners:
            what = "a reward model" if isinstance(judge, RewardModelEnvironmentConfig) else "engines"
            yield (
                f"cluster.rollout_runners={cluster.rollout_runners}: each runner would start {what} of its own. "
                f"With {place} use cluster.rollout_runners=0."
            )
    if cluster.uses_gpu and judges:
        yield from _check_gpus(judges, cluster)


def _check_scoring_model(place: str, judge: RewardModelEnvironmentConfig) -> Findings:
    """Check that a reward model is enabled and has one backend and one layout, and no adapters."""
    if not judge.enabled:
        yield f"{place}.enabled=false, but data names the environment reward_model. Set it to true."
    policy = judge.as_policy()
    yield from check_backend(place, policy)
    yield from check_one_layout(place, policy)
    for key in policy.adapter_keys:
        yield (
            f"{place}.{key}.enabled=true adds untrained adapters. Set it to false: checkpoints of training with "
            "adapters hold merged weights."
        )


def _check_gpus(judges: Judges, cluster: ClusterConfig) -> Findings:
    """Check that all judges together leave GPUs for the policy."""
    key = "gpus_per_node" if cluster.num_nodes == 1 else "num_nodes"
    has = getattr(cluster, key)
    asked = {f"{place}.resources.{key}": getattr(judge.resources, key) for place, judge in judges.items()}
    for name in (name for name, number in asked.items() if number is None):
        yield f"{name} is not set: how many of the cluster's devices this judge has."
    if sum(number or 0 for number in asked.values()) >= has:
        given = " and ".join(f"{name}={number}" for name, number in asked.items() if number is not None)
        verb = "leaves" if len(asked) == 1 else "leave"
        yield f"{given} {verb} no device for the policy: cluster.{key}={has}. Lower it, or use more devices."


type ModelKeys = Iterable[tuple[str, str, PolicyConfig]]
"""Keys of the names of each model and of its tokenizer, and its section (`RunConfig.model_keys`)."""


def check_own_code(models: ModelKeys, cluster: ClusterConfig) -> Findings:
    """Check that only parts that can run the code of a model's folder get it."""
    for key, _, model in models:
        generation, place = model.generation, key.removesuffix(".model_name")
        if generation is not None and "trust_remote_code" in generation.vllm_kwargs:
            yield f"vllm_kwargs.trust_remote_code is for the engine alone. Set {place}.trust_remote_code instead."
        if not model.trust_remote_code:
            continue
        name = f"{place}.trust_remote_code=true"
        if model.megatron_cfg.enabled:
            yield f"{name}: Megatron Core has layers of its own, and runs no code of a folder. Use {place}.dtensor_cfg."
        if model.draft.enabled:
            yield f"{name}: a draft model is trained for models of transformers only. Set {place}.draft.enabled=false."
        if cluster.rollout_runners:
            yield f"{name}: runners do not load the code of a tokenizer. Set cluster.rollout_runners=0."
        if generation is None:
            continue
        if generation.backend in ("megatron", "sglang"):
            yield f"{name} is not proven with {generation.backend} engines. Use vllm or hf."
        if "model" in (generation.vllm_kwargs.get("speculative_config") or {}):
            yield f"{name}: vLLM would also run code of the draft model. Remove vllm_kwargs.speculative_config.model."


def trust_models(models: ModelKeys) -> None:
    """Let the code of the models and tokenizers run whose `trust_remote_code` is true.

    Raises:
        ConfigError: a name is neither a folder nor a commit, or its code is in another repository.
        DownloadError: the files of a commit cannot be downloaded.
    """
    for model_key, tokenizer_key, model in models:
        if model.trust_remote_code:
            trust_code(model_key, model.model_name)
            trust_code(tokenizer_key, model.tokenizer.name)


_IMAGE_ARGUMENTS = ("mm_device_do_normalize", "mm_processor_kwargs", "language_model_only", "speculative_config")
"""Arguments of vLLM that would change images between engine and trainer, or that are not proven with images."""
_IMAGE_ENGINES = ("vllm", "hf")


def check_images(models: Mapping[str, Role], *, algorithm_reads_images: bool) -> Findings:
    """Check all models of a run.

    Args:
        algorithm_reads_images: Whether the algorithm's rows may have images.
    """
    for name, role in models.items():
        policy = role.section
        if policy.is_vlm != policy.tokenizer.use_processor:
            yield (
                f"{name}.is_vlm={str(policy.is_vlm).lower()}, but {name}.tokenizer.use_processor="
                f"{str(policy.tokenizer.use_processor).lower()}. Set both to the same value; is_vlm follows "
                "use_processor if it is left out."
            )
        if not policy.is_vlm:
            yield from _check_patches(name, policy)
            continue
        if name != "policy":
            yield f"{name}.is_vlm=true: only the policy reads images. Set {name}.tokenizer.use_processor=false."
        elif not algorithm_reads_images:
            yield "policy.is_vlm=true: images are read with GRPO, SFT and DPO. Use one of them, or rows of text."
        if name == "policy":
            yield from _check_image_backend(policy)
            yield from _check_image_engine(policy)


def _check_patches(name: str, policy: PolicyConfig) -> Findings:
    for key in ("sequence_packing", "dynamic_batching"):
        most = getattr(policy, key).max_patches
        if most is not None:
            yield f"{name}.{key}.max_patches={most} limits images, which {name}.is_vlm=false does not read. Remove it."


def _check_image_backend(policy: PolicyConfig) -> Findings:
    section = policy.backend_key
    if policy.megatron_cfg.enabled:
        yield (
            "policy.is_vlm=true: Megatron Core gets no images. Set policy.megatron_cfg.enabled=false and "
            "policy.dtensor_cfg.enabled=true."
        )
        return
    for size, key in _divided(policy):
        yield f"policy.{section}.{key}={size}: rows with images are divided over data-parallel ranks only. Set it to 1."
    if policy.dtensor_cfg.sequence_parallel:
        yield f"policy.{section}.sequence_parallel=true: images are not divided. Set it to false."
    if policy.reward_model_cfg.enabled:
        yield "policy.is_vlm=true: a reward model reads text alone. Set policy.tokenizer.use_processor=false."


def _divided(policy: PolicyConfig) -> Iterator[tuple[int, str]]:
    section: Any = policy.backend_section
    for axis in ("tensor", "pipeline", "context", "expert"):
        size = getattr(section, key := f"{axis}_parallel_size", 1)
        if size > 1:
            yield size, key


def _check_image_engine(policy: PolicyConfig) -> Findings:
    generation = policy.generation
    if generation is None:
        return
    place = "policy.generation"
    if generation.backend in ("megatron", "sglang"):
        yield f"{place}.backend={generation.backend} gets no images. Set it to {' or '.join(_IMAGE_ENGINES)}."
    if generation.engine.precision == "fp8":
        yield f"{place}.vllm_cfg.precision=fp8 is not proven for modules that read images. Set it to bfloat16."
    for key in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
        size = getattr(generation.engine, key)
        if size > 1:
            yield f"{place}.vllm_cfg.{key}={size} is not proven with images. Set it to 1."
    for key in _IMAGE_ARGUMENTS:
        if generation.vllm_kwargs.get(key):
            yield f"{place}.vllm_kwargs.{key}: with images, the adapter decides it. Remove it."
    if policy.draft.enabled:
        yield "policy.draft.enabled=true: speculation is not proven with images. Set it to false."
    frozen = policy.dtensor_cfg.automodel_kwargs.freeze_config
    trained = not (frozen.freeze_vision_tower and frozen.freeze_vision_projection)
    if policy.mixes_weights and trained:
        yield (
            f"{place}.weight_sync.recompute_kv_cache=false keeps features of images from older weights. Set it to "
            "true, or freeze the tower and the projection (policy.dtensor_cfg.automodel_kwargs.freeze_config)."
        )
