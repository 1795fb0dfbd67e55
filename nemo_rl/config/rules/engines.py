"""Checks that the generation ranks of each machine divide into engines.

`models.generation.vllm.check` checks the sizes against the model, which it reads. Invariant: an engine never spans
machines.
"""

from nemo_rl.config.base.part_names import is_own_class
from nemo_rl.config.rules.broken_rules import Findings, nearest_multiples
from nemo_rl.config.schema.model.generation import EngineConfig, GenerationConfig

_OWN_KEYS = {
    "tensor_parallel_size": "engine.tensor_parallel_size",
    "pipeline_parallel_size": "engine.pipeline_parallel_size",
    "enable_expert_parallel": "engine.expert_parallel_size",
    "distributed_executor_backend": None,
    "data_parallel_size": None,
}
"""Arguments of vLLM that decide how many processes an engine has, and the keys to use instead."""


def ranks_of_engine(engine: EngineConfig) -> int:
    """Return the number of processes of one engine, each with its own device."""
    return engine.tensor_parallel_size * engine.pipeline_parallel_size


def check_engines(section: str, generation: GenerationConfig, ranks: int, key: str) -> Findings:
    """Check that the ranks of each machine divide into engines of the requested size.

    Args:
        section: name of the section of `generation`.
        generation: the section.
        ranks: ranks of generation on each machine.
        key: key that sets that number.
    """
    engine = generation.engine
    tensor, stages, experts = (
        engine.tensor_parallel_size,
        engine.pipeline_parallel_size,
        engine.expert_parallel_size,
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
    if generation.backend in ("hf", "megatron") and max(tensor, stages, experts) > 1:
        yield (
            f"{section}.backend={generation.backend} computes on one device, but {section}.engine asks for "
            f"tensor_parallel_size={tensor}, pipeline_parallel_size={stages}, expert_parallel_size={experts}. Set them "
            "to 1, or use backend=vllm."
        )
        return
    if experts not in (1, tensor):
        yield (
            f"{section}.engine.expert_parallel_size={experts} does not go with tensor_parallel_size={tensor}: vLLM "
            "divides experts over all ranks of a stage, tensor_parallel_size x data_parallel_size, and an engine here "
            f"has data_parallel_size=1, so {tensor} x 1. Use expert_parallel_size={tensor}, or 1 to divide each expert "
            f"over the {tensor} ranks." + (f" Or set tensor_parallel_size={experts}." if experts > 1 else "")
        )
    size = ranks_of_engine(engine)
    if ranks and ranks % size:
        fitting = [n for n in range(1, ranks + 1) if ranks % n == 0]
        yield (
            f"{section}.engine.tensor_parallel_size={tensor} x pipeline_parallel_size={stages} = {size} ranks of an "
            f"engine do not divide the {ranks} generation rank{'s' * (ranks > 1)} of a machine ({key}), and an engine "
            f"stays on one machine.\n  {ranks} / {size} = {ranks / size:g}. {nearest_multiples(ranks, size)} "
            f"Or engines of {', '.join(map(str, fitting))} rank{'s' * (fitting != [1])}."
        )
