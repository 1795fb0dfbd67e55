"""Decide which keys may differ between a checkpoint's configuration and that of the resumed run.

A changed key is either applied from the next step on, or refused. It is refused if the checkpoint contains state that
depends on the old value, or if results before and after the change are not comparable. Invariant: a key that `APPLIED`
does not name is refused unless `checkpointing.allow_changed` names it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from nemo_rl.config.base.hidden_values import hidden_in
from nemo_rl.config.schema.model.policy import PolicyConfig

APPLIED: dict[str, tuple[str, ...]] = {
    "length, validation and early stop": (
        "*.max_num_steps",
        "*.max_num_epochs",
        "*.val_*",
        "*.max_val_samples",
        "*.stop_at_validation_*",
        "*.overlap.validation",
        "*.max_idle_steps",
        "data.validation",
    ),
    "optimizer settings and schedule": (
        "policy.optimizer.kwargs",
        "policy.scheduler",
        "policy.max_grad_norm",
        "policy.megatron_cfg.optimizer.*lr",
        "policy.megatron_cfg.optimizer.adam_*",
        "policy.megatron_cfg.optimizer.muon_*",
        "policy.megatron_cfg.optimizer.sgd_momentum",
        "policy.megatron_cfg.optimizer.weight_decay",
        "policy.megatron_cfg.optimizer.clip_grad",
        "policy.megatron_cfg.scheduler",
    ),
    "saving and logging": ("checkpointing", "logger"),
    "machines, deadlines and processes": (
        "cluster",
        "data.num_workers",
        "env.*.num_workers",
        "env.*.timeout_s",
        "policy.generation.colocated",
    ),
    "engines and weight sync": (
        "policy.generation.backend",
        "policy.generation.engine",
        "policy.generation.vllm_cfg",
        "policy.generation.vllm_kwargs",
        "policy.generation.weight_sync",
        "policy.generation.lora_refit_mode",
    ),
    "layout of passes and memory": (
        "policy.train_micro_batch_size",
        "policy.logprob_batch_size",
        "policy.logprob_chunk_size",
        "policy.offload_optimizer_for_logprob",
        "policy.make_sequence_length_divisible_by",
        "policy.dynamic_batching",
        "policy.sequence_packing",
        "policy.dtensor_cfg.*_size",
        "policy.dtensor_cfg.cpu_offload",
        "policy.dtensor_cfg.activation_checkpointing",
        "policy.dtensor_cfg.compile_layers",
        "policy.dtensor_cfg.keep_gathered",
        "policy.dtensor_cfg.flash_attention_version",
        "policy.dtensor_cfg.automodel_kwargs",
        "policy.dtensor_cfg.moe_parallelizer",
        "policy.dtensor_cfg.sequence_parallel",
        "policy.dtensor_cfg.context_parallel_method",
        "policy.dtensor_cfg.custom_parallel_plan",
        "policy.dtensor_cfg.env_vars",
        "policy.megatron_cfg.*_size",
        "policy.megatron_cfg.num_layers_in_*",
        "policy.megatron_cfg.sequence_parallel",
        "policy.megatron_cfg.activation_checkpointing",
        "policy.megatron_cfg.recompute_*",
        "policy.megatron_cfg.*_fusion",
        "policy.megatron_cfg.moe_token_dispatcher_type",
        "policy.megatron_cfg.moe_grouped_gemm",
        "policy.megatron_cfg.moe_shared_expert_overlap",
        "policy.megatron_cfg.transformer_impl",
        "policy.megatron_cfg.empty_unused_memory_level",
        "policy.megatron_cfg.distributed_data_parallel_config",
        "policy.megatron_cfg.env_vars",
        "*.colocated",
    ),
    "limits and defaults of data sets": ("data.max_bad_row_share", "data.default"),
}
"""Patterns of keys whose changed values a resumed run applies, grouped by subject.

The name of a section matches all its keys, and `policy.` matches the section of every model of the run. A change of
`data.default` also changes entries of `data.train`, whose keys are compared separately.
"""

_ABSENT = "(absent)"


@dataclass(frozen=True)
class ChangedKey:
    """A key whose value differs from that in the checkpoint."""

    key: str
    """Dotted path."""
    before: Any
    """Value in the checkpoint's configuration."""
    now: Any
    """Value of this run."""
    of_model: bool = False
    """Whether the key is in the section of a model."""

    @property
    def is_applied(self) -> bool:
        """Return True if a resumed run uses the new value without `checkpointing.allow_changed`."""
        return self.about is not None

    @property
    def about(self) -> str | None:
        """Return the subject of the key in `APPLIED`, or None if no pattern matches."""
        names = {self.key, f"policy.{self.key.partition('.')[2]}"} if self.of_model else {self.key}

        def holds(pattern: str) -> bool:
            return any(fnmatchcase(name, each) for name in names for each in (pattern, f"{pattern}.*"))

        return next((about for about, patterns in APPLIED.items() if any(map(holds, patterns))), None)

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.now}"


def changed_keys(config: BaseModel, stored: Mapping[str, Any]) -> list[ChangedKey]:
    """Return the keys that differ from a stored configuration.

    A secret is not compared if the stored configuration hides it. A key of the schema that only one side has belongs to
    another version of the library and is left out.

    Args:
        stored: `public_values(config)` of the run that wrote the checkpoint.
    """
    hidden = {".".join(map(str, place)): text for place, text in hidden_in(config).items()}
    models = {name for name in type(config).model_fields if isinstance(getattr(config, name), PolicyConfig)}
    return [
        replace(change, of_model=change.key.partition(".")[0] in models)
        for change in _walk(config, stored, "")
        if change.key not in hidden or change.before != hidden[change.key]
    ]


def _walk(now: Any, before: Any, path: str) -> Iterator[ChangedKey]:
    if isinstance(now, BaseModel) and isinstance(before, Mapping):
        for name in type(now).model_fields:
            if name in before:
                yield from _walk(getattr(now, name), before[name], f"{path}.{name}" if path else name)
    elif isinstance(now, Mapping) and isinstance(before, Mapping):
        for name in dict.fromkeys((*before, *now)):
            yield from _walk(now.get(name, _ABSENT), before.get(name, _ABSENT), f"{path}.{name}")
    elif isinstance(now, list) and isinstance(before, list) and len(now) == len(before):
        for index, (new, old) in enumerate(zip(now, before, strict=True)):
            yield from _walk(new, old, f"{path}.{index}")
    elif to_jsonable_python(now) != before:
        yield ChangedKey(path, before, to_jsonable_python(now))
