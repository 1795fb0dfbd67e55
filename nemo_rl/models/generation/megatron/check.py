"""Check that Megatron Core supports a model and can divide it over the ranks of an engine.

The check runs in the controller, which does not import Megatron Core.
"""

from collections.abc import Iterator
from itertools import chain

from transformers import PretrainedConfig

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.models.megatron.model.families import text_part
from nemo_rl.models.megatron.model.model_check import check_expressible
from nemo_rl.models.training.mesh_rules import Divided, Mesh, divided_layers, routed_experts, vocabulary
from nemo_rl.utils.errors import ConfigError


def check_model(policy: PolicyConfig, cluster: ClusterConfig) -> None:
    """Check that the engine can serve the model (`registry.EngineKind.check`)."""
    key = "policy.generation.backend=megatron"
    model = text_part(load_model_config(policy.model_name, policy.hf_config_overrides))
    try:
        check_expressible(model, generates=True)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error} The engines vllm and hf do not need Megatron Core.") from error
    problems = list(engine_size_problems(policy, model))
    if problems:
        raise ConfigError("policy.generation.engine." + "\npolicy.generation.engine.".join(problems))


def engine_size_problems(policy: PolicyConfig, model: PretrainedConfig) -> Iterator[str]:
    """Yield a message for each size of the engine that does not divide the model, with sizes that do.

    Args:
        policy: The section `policy`, with `generation`.
        model: Hugging Face configuration of the model.
    """
    engine = policy.sampling.engine
    mesh = Mesh("policy.generation.engine", policy, ParallelLayout(), model.get_text_config())
    by_ranks = chain(divided_layers(mesh), vocabulary(mesh))
    if mesh.experts is not None and engine.expert_parallel_size == 1:
        of_expert = mesh.divided("columns of an expert", "moe_intermediate_size", "intermediate_size")
        by_ranks = chain(by_ranks, of_expert)
    yield from _indivisible("tensor_parallel_size", engine.tensor_parallel_size, list(by_ranks))
    layers = [Divided("layers (num_hidden_layers)", mesh.layers)]
    yield from _indivisible("pipeline_parallel_size", engine.pipeline_parallel_size, layers)
    if engine.expert_parallel_size > 1 and mesh.experts is None:
        yield f"expert_parallel_size={engine.expert_parallel_size}, but the model has no experts. Set it to 1."
    else:
        yield from _indivisible("expert_parallel_size", engine.expert_parallel_size, list(routed_experts(mesh)))


def _indivisible(key: str, size: int, divided: list[Divided]) -> Iterator[str]:
    """Yield a message if a size does not divide some parts of a model."""
    remainders = [f"{each.count} {each.what} / {size} = {each.count / size:g}" for each in divided if each.count % size]
    if remainders:
        largest = min(each.count for each in divided)
        fitting = [n for n in range(1, largest + 1) if all(each.count % n == 0 for each in divided)]
        yield f"{key}={size} does not divide {', '.join(remainders)}. Sizes that do: {', '.join(map(str, fitting))}."
