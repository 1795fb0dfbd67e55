"""Check that the machines' generation ranks can be divided into engines.

`models.generation.vllm.check` reads the model and checks the sizes against it. Ranks are numbered machine by machine,
engine by engine, and within an engine by tensor parallelism first. Invariant: an engine that fits on a machine is on
one machine. A larger engine uses whole machines, and so do its tensor-parallel groups unless they fit on one machine.

`policy.zero_mismatch` needs an engine that computes as the trainer, and matrix products that are undivided or divided
over two ranks of the trainer, whose sums have one order.
`invariant_gradients` needs the PyTorch-native backend, sharded over data-parallel ranks only, and nothing that depends
on several rows.
"""

from collections.abc import Iterable, Sequence

from nemo_rl.config.base.names import is_own_class
from nemo_rl.config.rules.broken_rules import Findings, nearest_multiples
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.model.generation import EngineConfig, GenerationConfig
from nemo_rl.config.schema.model.policy import PolicyConfig

_OWN_KEYS = {
    "tensor_parallel_size": "engine.tensor_parallel_size",
    "pipeline_parallel_size": "engine.pipeline_parallel_size",
    "enable_expert_parallel": "engine.expert_parallel_size",
    "distributed_executor_backend": None,
    "data_parallel_size": None,
}
"""Arguments of vLLM that determine the number of processes of an engine, with the keys to use instead."""

_SERVER_SIZES = ("dp_size", "pp_size", "ep_size")
"""Arguments of SGLang besides `tp_size` that give a server more GPUs."""


def ranks_of_engine(engine: EngineConfig) -> int:
    """Return the number of processes of one engine, each with its own device."""
    return replicas_of_engine(engine) * engine.tensor_parallel_size * engine.pipeline_parallel_size


def replicas_of_engine(engine: EngineConfig) -> int:
    """Return the number of replicas of the non-expert layers in one engine. Its ranks divide the experts."""
    return max(1, engine.expert_parallel_size // engine.tensor_parallel_size)


def product(engine: EngineConfig) -> str:
    """Return the sizes whose product is the number of ranks of an engine, as text."""
    replicas = replicas_of_engine(engine)
    return (
        f"tensor_parallel_size={engine.tensor_parallel_size} x pipeline_parallel_size={engine.pipeline_parallel_size}"
        + (f" x {replicas} (expert_parallel_size / tensor_parallel_size)" if replicas > 1 else "")
    )


def misplaced(tensor: int, size: int, counts: Sequence[int]) -> str | None:
    """Describe a wrong number of ranks on a machine. Return None if all ranks can be divided into engines.

    Args:
        tensor: ranks of a tensor-parallel group.
        counts: generation ranks of each machine, all at least 1.
    """
    least, machines = min(counts), len(counts)
    if size <= least:
        return next((_remainder(size, count) for count in counts if count % size), None)
    if len(set(counts)) > 1:
        return f"do not fit on a machine with {least}, and the machines have unequal numbers of ranks: {list(counts)}."
    if size % least:
        return (
            f"are more than the {_ranks(least)} of a machine, so an engine takes whole machines, and no multiple of "
            f"them.\n  {size} / {least} = {size / least:g}. Use engines of {_listed(_whole(least, machines))}."
        )
    if machines % (size // least):
        return (
            f"are {size // least} machines of {_ranks(least)}, and there {'are' if machines > 1 else 'is'} "
            f"{machines}.\n  {machines} / {size // least} = {machines / (size // least):g}. "
            f"{nearest_multiples(machines, size // least)} Or engines of {_listed(_whole(least, machines))}."
        )
    if least % tensor and tensor % least:
        fitting = [n for n in range(1, size + 1) if size % n == 0 and (least % n == 0 or n % least == 0)]
        return (
            f"would divide a tensor-parallel group of {tensor} ranks unequally among machines of {_ranks(least)}. "
            f"Use a tensor_parallel_size of {', '.join(map(str, fitting))} with the same number of ranks."
        )
    return None


def _remainder(size: int, count: int) -> str:
    """Return a text that engines of `size` ranks do not divide the `count` ranks of a machine."""
    return (
        f"do not divide the {_ranks(count)} of a machine, and an engine that fits on a machine stays on one.\n"
        f"  {count} / {size} = {count / size:g}. {nearest_multiples(count, size)} "
        f"Or engines of {_listed(n for n in range(1, count + 1) if count % n == 0)}."
    )


def _whole(least: int, machines: int) -> list[int]:
    """Return the sizes of engines that fit on machines with `least` ranks or use whole machines."""
    within = [n for n in range(1, least) if least % n == 0]
    return within + [n * least for n in range(1, machines + 1) if machines % n == 0]


def _listed(sizes: Iterable[int]) -> str:
    """Return numbers of ranks as text: "1, 2, 4 ranks"."""
    found = list(sizes)
    return f"{', '.join(map(str, found))} rank{'s' * (found != [1])}"


def _ranks(count: int) -> str:
    return f"{count} generation rank{'s' * (count > 1)}"


def check_engines(section: str, generation: GenerationConfig, counts: Sequence[int], keys: str) -> Findings:
    """Check that the machines' ranks can be divided into engines of the configured size.

    Args:
        section: name of the section of `generation`.
        counts: number of generation ranks on each machine; empty or all 0 if it is unknown.
        keys: keys that set these numbers.
    """
    engine = generation.engine
    tensor, stages, experts = (
        engine.tensor_parallel_size,
        engine.pipeline_parallel_size,
        engine.expert_parallel_size,
    )
    if section == "policy.generation" and generation.vllm_kwargs.get("quantization") is not None:
        yield (
            f"{section}.vllm_kwargs.quantization={generation.vllm_kwargs['quantization']} quantizes weights of a file, "
            f"but engines of a run that trains get theirs from the trainer. Write {section}.vllm_cfg.precision=fp8."
        )
    for argument in _OWN_KEYS.keys() & generation.vllm_kwargs.keys():
        own = _OWN_KEYS[argument]
        advice = f"Write {section}.{own}." if own else "Remove it."
        yield f"{section}.vllm_kwargs.{argument} decides which processes an engine has, which Ray must know. {advice}"
    if generation.engine_kwargs and not is_own_class(generation.backend):
        yield (
            f"{section}.engine_kwargs={generation.engine_kwargs} are arguments of an engine of your own, and "
            f"{section}.backend={generation.backend} is built in. Take them away; for vllm see {section}.vllm_kwargs."
        )
    yield from _check_servers(section, generation, counts)
    if generation.backend in ("hf", "sglang") and max(tensor, stages, experts) > 1:
        yield (
            f"{section}.backend={generation.backend} computes on one device, but {section}.engine asks for "
            f"tensor_parallel_size={tensor}, pipeline_parallel_size={stages}, expert_parallel_size={experts}. Set them "
            "to 1, or use backend=vllm or megatron."
        )
        return
    if generation.backend == "megatron" and experts not in (1, tensor):
        yield (
            f"{section}.backend=megatron divides experts over the ranks of a stage, and "
            f"{section}.engine.expert_parallel_size={experts} is not tensor_parallel_size={tensor}. Use {tensor}"
            f"{', or 1 to divide each expert' if tensor > 1 else ''}; backend=vllm also divides them over replicas."
        )
        return
    if experts > 1 and experts % tensor:
        yield (
            f"{section}.engine.expert_parallel_size={experts} does not go with tensor_parallel_size={tensor}: vLLM "
            "divides experts over all ranks of a stage, tensor_parallel_size x data_parallel_size. Use a multiple of "
            f"tensor_parallel_size, or 1 to divide each expert over the {tensor} ranks. "
            f"{nearest_multiples(experts, tensor)}"
        )
        return
    size = ranks_of_engine(engine)
    wrong = misplaced(tensor, size, counts) if counts and min(counts) else None
    if wrong is not None:
        yield f"{section}.engine.{product(engine)} = {size} rank{'s' * (size > 1)} of an engine {wrong} Keys: {keys}."


def _check_servers(section: str, generation: GenerationConfig, counts: Sequence[int]) -> Findings:
    """Check that SGLang's servers can be started or are named, and that they can do the configured work."""
    if generation.backend != "sglang":
        return
    keys, config = f"{section}.sglang_cfg", generation.sglang_cfg
    router = config.sglang_router_config
    if router.use_external_router:
        if router.sglang_router_ip is None or router.sglang_router_port is None:
            yield (
                f"{keys}.sglang_router_config.use_external_router=true needs the address of the server or router: "
                "sglang_router_ip and sglang_router_port."
            )
        if sum(counts) > 1:
            yield (
                f"{keys}.sglang_router_config.use_external_router=true gives the run one engine, and there are "
                f"{sum(counts)} ranks of generation. Use one rank: {section}.colocated.enabled=false with "
                "colocated.resources.ranks_per_node=1 (gpus_per_node=1 with GPUs)."
            )
    else:
        sizes = {"tp_size": config.tp_size} | {name: config.server_args.get(name) or 1 for name in _SERVER_SIZES}
        large = [f"{name}={size}" for name, size in sizes.items() if size != 1]
        if large:
            yield (
                f"{keys}: {', '.join(large)}, but the library starts servers of one GPU. Set it to 1, which starts a "
                "server for each GPU, or start larger ones by hand: sglang_router_config.use_external_router=true."
            )
    if generation.bad_words:
        yield f"{section}.bad_words: SGLang has no bad words. Remove them, or use {section}.backend=vllm."
    mode = config.sglang_server_config.pause_generation_mode
    keeps, recomputes = mode == "in_place", generation.weight_sync.recompute_kv_cache
    if keeps == recomputes:
        yield (
            f"{keys}.sglang_server_config.pause_generation_mode={mode} {'keeps' if keeps else 'computes again'} the "
            "keys and values of running answers, but "
            f"{section}.weight_sync.recompute_kv_cache={str(recomputes).lower()}. Use "
            f"{'abort or retract' if keeps else 'in_place'}, or set recompute_kv_cache={str(not keeps).lower()}."
        )


_ZERO = "policy.zero_mismatch=true"
ENGINE_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size")
_LAYERS_OF = {"hf": "dtensor_cfg", "vllm": "dtensor_cfg", "megatron": "megatron_cfg"}
"""Engines that can compute as a training backend, and the sections of these backends."""


def check_zero_mismatch(policy: PolicyConfig, cluster: ClusterConfig) -> Findings:
    """Refuse settings with which engine and trainer would compute other bits."""
    if not policy.zero_mismatch or policy.generation is None:
        return
    generation, engine = policy.generation, policy.generation.engine
    if cluster.uses_gpu:
        yield f"{_ZERO} computes on CPUs only so far, and cluster.device={cluster.device}. Set it to false."
    backend = _LAYERS_OF.get(generation.backend)
    if backend is None:
        yield (
            f"{_ZERO} needs an engine that computes as the trainer, and policy.generation.backend="
            f"{generation.backend} has kernels of its own. Set it to hf or vllm (with dtensor_cfg), or megatron (with "
            "megatron_cfg)."
        )
    elif backend != policy.backend_key:
        yield (
            f"{_ZERO} with policy.generation.backend={generation.backend} needs a policy of policy.{backend}, and the "
            f"policy is one of policy.{policy.backend_key}. Change one of them."
        )
    if engine.precision not in ("auto", policy.precision):
        yield (
            f"{_ZERO} needs one number format, and policy.precision={policy.precision} differs from "
            f"policy.generation.engine.precision={engine.precision}. Set the latter to auto."
        )
    for key in policy.adapter_keys:
        yield f"{_ZERO}: engines round otherwise with adapters. Set policy.{key}.enabled=false."
    if policy.is_vlm:
        yield f"{_ZERO} is for rows of text, and policy.is_vlm=true. Set it to false."
    if policy.dtensor_cfg.enabled and policy.dtensor_cfg.compile_layers:
        yield f"{_ZERO}: compiled layers round less often. Set policy.dtensor_cfg.compile_layers=false."
    yield from _check_ordered_sums(policy)
    sizes = {f"policy.generation.engine.{name}": getattr(engine, name) for name in ENGINE_SIZES}
    divided = _sizes("policy", policy) | sizes
    if policy.dtensor_cfg.enabled:
        del divided["policy.dtensor_cfg.tensor_parallel_size"]
    yield from check_division(_ZERO, divided)


def _check_ordered_sums(policy: PolicyConfig) -> Findings:
    """Refuse tensor-parallel ranks of the trainer whose sums an engine with a whole model cannot compute."""
    section, key = policy.dtensor_cfg, "policy.dtensor_cfg"
    if not section.enabled or section.tensor_parallel_size == 1:
        return
    if section.tensor_parallel_size > 2:
        yield (
            f"{_ZERO}: the sum of two ranks has one order, and {key}.tensor_parallel_size="
            f"{section.tensor_parallel_size}. Set it to 1 or 2."
        )
    if section.custom_parallel_plan is not None:
        yield (
            f"{_ZERO}: the engine divides sums by the model's own plan, and {key}.custom_parallel_plan="
            f"{section.custom_parallel_plan!r}. Set it to null, or {key}.tensor_parallel_size=1."
        )


def check_lora_refit(policy: PolicyConfig) -> Findings:
    """Refuse settings with which engines cannot compute with adapters that are sent alone."""
    if not policy.sends_adapters or policy.generation is None:
        return
    generation, key = policy.generation, "policy.generation.lora_refit_mode"
    what, otherwise = f"{key}=adapter", f"or set {key}=merged"
    if "megatron_cfg.peft" in policy.adapter_keys:
        yield (
            f"{what} sends adapters of policy.dtensor_cfg.lora_cfg, and the policy's are those of policy.megatron_cfg."
            f"peft. Train with policy.dtensor_cfg, {otherwise}."
        )
    elif not policy.dtensor_cfg.lora_cfg.enabled:
        yield f"{what} needs adapters that are trained. Set policy.dtensor_cfg.lora_cfg.enabled=true, {otherwise}."
    if generation.backend not in ("hf", "vllm"):
        yield (
            f"{what} needs an engine that computes base and adapter, and policy.generation.backend="
            f"{generation.backend} gets merged weights only. Set policy.generation.backend=vllm or hf, {otherwise}."
        )
    if generation.engine.precision == "fp8":
        yield (
            f"{what} sends no weights that could be converted, and policy.generation.engine.precision=fp8. Set it to "
            f"auto, {otherwise}."
        )
    if policy.is_vlm:
        yield f"{what} is for rows of text, and policy.is_vlm=true. Set it to false, {otherwise}."


def _sizes(section: str, model: PolicyConfig) -> dict[str, int | None]:
    """Return the numbers of ranks that divide a model, by key."""
    names = (
        *("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size", "expert_parallel_size"),
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
    )
    return {f"{section}.{model.backend_key}.{name}": getattr(model.backend_section, name, 1) for name in names}


def check_division(what: str, sizes: dict[str, int | None]) -> Findings:
    """Refuse ranks that divide a model. `sizes` has their numbers by key."""
    for name, size in sizes.items():
        if size and size > 1:
            yield f"{what} is proven for undivided models, and {name}={size}. Set it to 1. Data parallelism works."


def check_device(policy: PolicyConfig, cluster: ClusterConfig) -> Findings:
    """Refuse GPUs with `invariant_gradients`."""
    if policy.invariant_gradients and cluster.uses_gpu:
        yield (
            f"policy.invariant_gradients=true computes on CPUs only so far, and cluster.device={cluster.device}. Set "
            "it to false."
        )


def check_invariant_gradients(section: str, model: PolicyConfig) -> Findings:
    """Refuse settings with which an update would depend on microbatches or on the number of data-parallel ranks."""
    if not model.invariant_gradients:
        return
    what, ours = f"{section}.invariant_gradients=true", model.dtensor_cfg
    if model.backend_key != "dtensor_cfg":
        yield (
            f"{what} needs the PyTorch-native backend, and {section} is trained with {section}.{model.backend_key}. "
            f"Set {section}.dtensor_cfg.enabled=true and the other backend's enabled to false."
        )
        return
    if ours.dp_replicate_size > 1:
        yield (
            f"{what} adds the gradients of all ranks in order, and {section}.dtensor_cfg.dp_replicate_size="
            f"{ours.dp_replicate_size} adds them in groups. Set it to 1."
        )
    if ours.moe_aux_loss_coeff:
        yield (
            f"{what}: the auxiliary loss of experts is one of all rows together. Set {section}.dtensor_cfg."
            "moe_aux_loss_coeff=0."
        )
    if ours.lora_cfg.enabled and ours.lora_cfg.dropout > 0:
        yield f"{what}: each rank drops others. Set {section}.dtensor_cfg.lora_cfg.dropout=0."
    if model.draft.enabled:
        yield f"{what}: a draft model learns from all rows of a microbatch. Set {section}.draft.enabled=false."
    if model.optimizer is not None and model.optimizer.is_muon:
        yield (
            f"{what}: Muon divides the work on matrices among ranks. Set {section}.optimizer.name=torch.optim.AdamW."
        )
    yield from check_division(what, _sizes(section, model))
