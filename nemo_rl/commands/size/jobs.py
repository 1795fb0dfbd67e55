"""Describe one model whose sizes are searched: its section, its ranks, the rows of an update, counts of parameters.

Invariant: nothing in a job depends on the sizes that are searched.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from transformers import PretrainedConfig

from nemo_rl.algorithms.setup.memory_forecast import rows_per_prompt, rows_per_sample
from nemo_rl.config import MasterConfig, PolicyConfig, Role, divide_cluster, model_ranks, plan_topology
from nemo_rl.models.capacity.memory import MemoryPlan
from nemo_rl.models.capacity.memory_trace import ModelTrace, trace_model
from nemo_rl.models.huggingface.load import load_model_config, torch_dtype
from nemo_rl.models.huggingface.sizes import head_size
from nemo_rl.models.training.backends import TrainingBackend, training_backend
from nemo_rl.utils.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class GpuKind:
    """One kind of GPU in a machine."""

    name: str
    """Name on the command line."""
    memory_gib: float
    """Memory as `nvidia-smi` reports it."""
    tflops: float
    """Dense bfloat16 operations, in 1e12 a second."""
    memory_gb_s: float
    """Bandwidth of the GPU's memory, in 1e9 bytes a second."""
    link_gb_s: float
    """Bandwidth to another GPU of the machine, in 1e9 bytes a second."""
    network_gb_s: float
    """Bandwidth to other machines for each GPU, in 1e9 bytes a second."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        GpuKind("h100", 79.6, 989.4, 3350.0, 450.0, 50.0),
        GpuKind("h200", 140.4, 989.4, 4800.0, 450.0, 50.0),
        GpuKind("b200", 179.0, 2250.0, 8000.0, 900.0, 50.0),
        GpuKind("a100", 80.0, 312.0, 2039.0, 300.0, 25.0),
        GpuKind("a100-40gb", 40.0, 312.0, 1555.0, 300.0, 25.0),
        GpuKind("l40s", 45.0, 362.0, 864.0, 32.0, 12.5),
        GpuKind("rtx4090", 24.0, 165.2, 1008.0, 32.0, 3.0),
    )
}
"""GPUs by name. If a GPU has several kinds, the name means the SXM module. The network has one port for each GPU: of
400 Gb/s for Hopper and Blackwell, 200 Gb/s for Ampere, 100 Gb/s for L40S, and 25 Gb/s for a desktop card."""

_SIZE = re.compile(r"([\d.]+)\s*(GiB|MiB)?", re.IGNORECASE)


def memory_of(text: str) -> float:
    """Read a memory size such as `80GiB`, in GiB.

    Raises:
        ConfigError: the text is not a positive size in GiB or MiB.
    """
    found = _SIZE.fullmatch(text.strip())
    number = float(found[1]) if found and found[1].count(".") <= 1 and found[1] != "." else 0.0
    if found is None or number <= 0:
        raise ConfigError(
            f"--gpu-memory {text}: give the memory of a GPU in GiB or MiB, as nvidia-smi reports it, for example 80GiB."
        )
    return number / 1024 if (found[2] or "").lower() == "mib" else number


def chosen_gpu(name: str | None, memory_gib: float | None) -> GpuKind:
    """Return the kind of GPU that the command line names, with its memory.

    Args:
        name: name of the GPU in `GPUS`; if None, the speeds of the first one.
        memory_gib: its memory in GiB, or None for that of the table.

    Raises:
        ConfigError: the name is unknown.
    """
    known = name is None or name.lower() in GPUS
    if not known:
        raise ConfigError(
            f"--gpu {name} is unknown.{did_you_mean(str(name), GPUS)} There are {', '.join(GPUS)}; for another one "
            "give its memory: --gpu-memory 80GiB."
        )
    gpu = next(iter(GPUS.values())) if name is None else GPUS[name.lower()]
    return gpu if memory_gib is None else replace(gpu, memory_gib=memory_gib)


_TRACED_TOKENS = 128
_EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


@dataclass(frozen=True)
class Job:
    """A model whose sizes are searched."""

    config: MasterConfig
    """The run, with model configurations that exist on this machine (`hub_configs.with_local_configs`)."""
    name: str
    """Name of the model's section."""
    gpu: GpuKind

    @cached_property
    def role(self) -> Role:
        """The role of the model in the run."""
        return self.config.models[self.name]

    @property
    def section(self) -> PolicyConfig:
        """The model's section."""
        return self.role.section

    @property
    def adapts(self) -> bool:
        """True if only adapters are trained, and all other weights are frozen."""
        section = self.section
        return section.megatron_cfg.peft.enabled if self.is_megatron else section.dtensor_cfg.lora_cfg.enabled

    @property
    def is_megatron(self) -> bool:
        """True if Megatron Core trains the model."""
        return self.section.backend_key == "megatron_cfg"

    @cached_property
    def ranks(self) -> int:
        """Ranks of the model."""
        return model_ranks(self.config.model_cluster, self.config.models)[self.name]

    @cached_property
    def per_node(self) -> int:
        """Ranks of a machine, which its fast links connect."""
        part = divide_cluster(self.config.model_cluster, self.config.models)[self.name]
        if (self.role.shares_with or self.name) == "policy":
            return plan_topology(part, self.config.policy).policy_ranks_per_node
        return part.policy_ranks_per_node

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return self.section.max_total_sequence_length

    @property
    def rows_each(self) -> int:
        """Rows of a sample: 2 for pairs of answers."""
        return rows_per_sample(self.config)

    @property
    def batch(self) -> int:
        """Rows in one update of the policy, which the other models read too."""
        return self.config.policy.train_global_batch_size * self.rows_each

    @property
    def answers(self) -> int:
        """Rows that begin with the same prompt."""
        return rows_per_prompt(self.config)

    @cached_property
    def model(self) -> PretrainedConfig:
        """The model's configuration."""
        return load_model_config(self.section.model_name, self.section.hf_config_overrides)

    @cached_property
    def text(self) -> Any:
        """Part of the configuration about language."""
        return self.model.get_text_config()

    @cached_property
    def trace(self) -> ModelTrace:
        """Counts of the model's parameters."""
        dtype = torch_dtype(self.section.precision)
        try:
            return trace_model(self.model, _TRACED_TOKENS, dtype, scores=self.section.reward_model_cfg.enabled)
        except (AttributeError, RuntimeError) as error:
            raise self._not_described(f"its layers cannot be counted ({str(error).splitlines()[0]})") from error

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer, or 0 in a dense model."""
        has_experts = any(layer.experts for layer in self.trace.layers)
        return next((n for key in _EXPERTS if (n := getattr(self.text, key, None))), 0) if has_experts else 0

    @cached_property
    def active_share(self) -> float:
        """Share of the experts that compute each token."""
        chosen = next((n for key in _EXPERTS_OF_A_TOKEN if (n := getattr(self.text, key, None))), 1)
        return chosen / self.num_experts if self.num_experts else 1.0

    @cached_property
    def multiplied(self) -> float:
        """Number of parameters that a token is multiplied with: matrices, its experts, the head."""
        layers = sum(layer.matrices + layer.experts * self.active_share for layer in self.trace.layers)
        return layers + self.trace.hidden * self.trace.vocabulary

    @property
    def attention_width(self) -> int:
        """Width of the queries of a layer, over all heads."""
        return int(self.text.num_attention_heads * head_size(self.text))

    @property
    def key_value_width(self) -> int:
        """Width of the keys and values of a layer together, over all heads."""
        heads = getattr(self.text, "num_key_value_heads", None) or self.text.num_attention_heads
        return int(2 * heads * head_size(self.text))

    @cached_property
    def backend(self) -> TrainingBackend:
        """The training backend of the section."""
        return training_backend(self.section)

    def require_description(self) -> None:
        """Check that memory and work of the model can be predicted.

        Raises:
            ConfigError: they cannot be predicted.
        """
        if self.backend.rank_memory() is None:
            raise ConfigError(
                f"{self.name}.training_backend.name={type(self.backend).__name__} predicts no memory, so its sizes "
                "cannot be searched. Return a class from its rank_memory, or use dtensor_cfg or megatron_cfg."
            )
        if not self.trace.activations:
            raise self._not_described("its layers do not run without data, so their activations are unknown")
        try:
            assert self.attention_width and self.key_value_width
        except AttributeError as error:
            raise self._not_described(f"it has no attention as other models have ({error})") from error

    def _not_described(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.name}.model_name={self.section.model_name} is a {self.model.model_type}, whose sizes cannot be "
            f"searched: {why}. Choose them yourself, and compare some steps of a run."
        )

    def plan(self, section: PolicyConfig) -> MemoryPlan:
        """Predict the memory of a rank with another section."""
        plan = self.backend.predict_memory(
            section,
            self.ranks,
            trains=self.role.trains,
            keeps_reference=self.role.keeps_reference,
            on_gpu=True,
            rows_per_prompt=self.answers,
            rows_per_sample=self.rows_each,
        )
        assert plan is not None, "the backend predicts memory"
        return plan


def with_values[ConfigT: MasterConfig](config: ConfigT, values: Mapping[str, Any]) -> ConfigT:
    """Copy a configuration and set keys in the copy.

    Args:
        config: a checked configuration.
        values: values by dotted key; every section of a key exists.
    """
    changed = deepcopy(config)
    for key, value in values.items():
        *sections, last = key.split(".")
        place: Any = changed
        for name in sections:
            place = getattr(place, name)
        setattr(place, last, value)
    return changed
