"""Choose the sizes of engines: ranks of each, and their share of the memory.

The seconds of an engine are estimated for answers of maximum length: each decoding step reads the weights and the
cached keys and values of all running answers. Invariant: as in `costs`, only ratios mean something.
"""

from dataclasses import dataclass
from itertools import product
from math import ceil, floor

from nemo_rl.algorithms.setup.memory_forecast import USABLE_SHARE
from nemo_rl.commands.size.costs import REACHED, REACHED_LINK
from nemo_rl.commands.size.jobs import Job, with_values
from nemo_rl.config import MasterConfig, RolloutMasterConfig, plan_topology
from nemo_rl.models.capacity.engine_memory import EngineMemory, engine_memory
from nemo_rl.models.generation.factory import check_engine_model, engine_precision
from nemo_rl.models.huggingface.load import torch_dtype
from nemo_rl.models.quantization.choice import weight_quantization
from nemo_rl.utils.errors import ConfigError

ENGINE = "policy.generation.engine"
MOST_SHARE = 0.9
"""Largest share of a GPU that is proposed for an engine."""
STEP_OF_SHARE = 0.05
_ROUNDING = 1e-9
MOST_RUNNING = 1024
"""Answers that vLLM runs at the same time on devices of at least 70 GiB (`EngineArgs.get_batch_defaults`)."""
REACHED_MEMORY = 0.6
"""Share of the memory's bandwidth that a decoding step reaches."""
EXCHANGE_S = 1.5e-5
"""Seconds of a small exchange between the ranks of an engine, two in each layer."""
STEP_S = 2e-3
"""Seconds of a decoding step that do not depend on its size."""


@dataclass(frozen=True)
class EngineChoice:
    """Sizes of the engines."""

    tensor: int
    """Ranks that divide each layer."""
    stages: int
    """Stages of layers."""
    experts: int
    """Ranks that divide the experts."""
    share: float
    """`gpu_memory_utilization`."""
    engines: int
    answers: int
    """Answers of a training step for each engine."""
    room: int
    """Answers of full length for which its cache has room."""
    seconds: float
    """Estimated seconds to sample a step."""

    def values(self) -> dict[str, object]:
        """Write the sizes as values of keys."""
        return _sizes(self.tensor, self.stages, self.experts) | {f"{ENGINE}.gpu_memory_utilization": self.share}


def _sizes(tensor: int, stages: int, experts: int) -> dict[str, object]:
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "expert_parallel_size": experts}
    return {f"{ENGINE}.{key}": size for key, size in sizes.items()}


def engines_of_one_rank(config: MasterConfig) -> dict[str, object]:
    """Return the smallest sizes as values of keys, for searches of models: engines are chosen after them."""
    return _sizes(1, 1, 1) if config.policy.generation is not None else {}


def engine_choices(job: Job, config: MasterConfig, reserved: float) -> list[EngineChoice]:
    """Return the engines that fit, the fastest first; equally fast ones with fewer ranks first.

    Engines over several machines are returned only if none fits on one, because their ranks exchange through a network.

    Args:
        job: the policy.
        config: the run, with the sizes of its models.
        reserved: bytes of a device that models and a weight sync need while engines hold their memory.
    """
    topology = plan_topology(config.policy_cluster, config.policy)
    ranks, machines = topology.generation_ranks_per_node, topology.generation_nodes
    sizes = [n for n in (1, 2, 4, 8, 16) if n <= ranks]
    on_one = [(tensor, stages) for tensor, stages in product(sizes, sizes) if ranks % (tensor * stages) == 0]
    on_several = [(ranks, stages) for stages in range(2, machines + 1) if machines % stages == 0]
    found: list[EngineChoice] = []
    for sizes_of_engines in (on_one, on_several):
        for tensor, stages in sizes_of_engines:
            engines = topology.generation_ranks // (tensor * stages)
            choice = _choice(job, config, (tensor, stages, engines), reserved)
            found += [choice] if choice is not None else []
        if found:
            break
    return sorted(found, key=lambda choice: (choice.seconds, choice.tensor * choice.stages))


def _choice(job: Job, config: MasterConfig, sizes: tuple[int, int, int], reserved: float) -> EngineChoice | None:
    """Return an engine of these sizes with its share of the memory; None if it does not fit."""
    tensor, stages, engines = sizes
    assert config.policy.generation is not None, "the run samples"
    experts = tensor if config.policy.generation.engine.expert_parallel_size > 1 else 1
    changed = with_values(config, _sizes(tensor, stages, experts))
    generation = changed.policy.generation
    assert generation is not None, "the run samples"
    try:
        check_engine_model(changed.policy, changed.cluster)
    except ConfigError:
        return None
    itemsize = torch_dtype(engine_precision(changed.policy)).itemsize
    quantization = weight_quantization(changed.policy, changed.cluster)
    memory = engine_memory(job.model, generation, itemsize, quantization)
    answers = ceil(samples_of_a_step(config) / engines)
    row, device = generation.engine.max_model_len * memory.cache_per_token, job.gpu.memory_gib * 2**30
    fixed = memory.weights + memory.workspace
    wanted = fixed + min(answers, MOST_RUNNING) * row
    most = min((USABLE_SHARE * device - reserved) / device, MOST_SHARE)
    steps = min(floor(most / STEP_OF_SHARE + _ROUNDING), ceil(wanted / device / STEP_OF_SHARE))
    share = round(steps * STEP_OF_SHARE, 2)
    room = floor((share * device - fixed) / row) if share > 0 else 0
    if room < 1:
        return None
    seconds = _seconds(job, memory, (tensor, stages), min(answers, room, MOST_RUNNING), answers)
    return EngineChoice(tensor, stages, experts, share, engines, answers, room, seconds)


def samples_of_a_step(config: MasterConfig) -> int:
    """Return the answers that are sampled for a step."""
    assert isinstance(config, RolloutMasterConfig), "the run samples"
    return config.algorithm.num_prompts_per_step * config.algorithm.num_generations_per_prompt


def _seconds(job: Job, memory: EngineMemory, sizes: tuple[int, int], running: int, answers: int) -> float:
    """Estimate the sampling of all answers of an engine, `running` at a time."""
    (tensor, stages), gpu = sizes, job.gpu
    assert job.section.generation is not None, "the run samples"
    length = job.section.generation.engine.max_model_len
    read = memory.weights + running * length / 2 * memory.cache_per_token
    reading = read / (gpu.memory_gb_s * 1e9 * REACHED_MEMORY)
    computing = 2 * job.multiplied * running / (tensor * stages) / (gpu.tflops * 1e12 * REACHED)
    moved = 2 * 2 * (tensor - 1) / tensor * job.trace.hidden * 2 * running / (gpu.link_gb_s * 1e9 * REACHED_LINK)
    exchange = len(job.trace.layers) * (moved + 2 * EXCHANGE_S * (tensor > 1))
    return ceil(answers / running) * length * (max(reading, computing) * stages + exchange + STEP_S)
