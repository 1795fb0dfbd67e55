"""Which training backend a configuration asks for, and what it says about runs and checkpoints without a model.

`TrainingBackend` lives in the controller, in tools and before Ray starts; it names the `PolicyBackend` that each rank
builds. Invariant: nothing outside of a backend knows what is in the folders `weights` and `optimizer` of a checkpoint.
"""

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from nemo_rl.config import CheckpointingConfig, PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.capacity.memory import MemoryPlan, Work, keys_per_token, microbatch_tokens
from nemo_rl.utils.errors import CheckpointError, ConfigError
from nemo_rl.utils.named_parts import Registry, check_own_keys

if TYPE_CHECKING:  # they take seconds to import, and a wrong configuration is answered before
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.models.capacity.rank_memory import RankMemory
    from nemo_rl.models.huggingface.comparison import ExportCheck

BACKENDS = {
    "dtensor_cfg": "nemo_rl.models.dtensor.training_backend.DTensorTraining",
    "megatron_cfg": "nemo_rl.models.megatron.training_backend.MegatronTraining",
}
"""Backends of the library: the section of `policy` that enables each, and its class. The first is on by default."""


class TrainingBackend(ABC):
    """A training backend, as everything but its ranks sees it. Imports no library that only ranks need."""

    rank_class: ClassVar[str]
    """Dotted name of its `PolicyBackend`, imported in the ranks."""

    config_class: ClassVar[type | None] = None
    """Dataclass or pydantic model that `training_backend.kwargs` have to fit; None checks nothing."""
    offloads_trained_weights: ClassVar[bool] = False
    """Whether `PolicyBackend.move_weights` also moves the weights of a model with an optimizer."""

    @abstractmethod
    def check(self, policy: PolicyConfig, num_ranks: int, section: str = "policy") -> None:
        """Refuse, before Ray starts, a model that cannot be trained or cannot answer.

        Args:
            policy: section of the model.
            num_ranks: processes that will hold it.
            section: name of the section, for messages; of a run's models `policy` is the one that is trained.

        Raises:
            ConfigError: names the keys.
        """

    def environment(self, policy: PolicyConfig) -> dict[str, str]:
        """Environment variables of the ranks; `env_vars` of the backend's section come on top."""
        return {}

    def rank_memory(self) -> "type[RankMemory] | None":
        """How the memory of a rank is predicted; None where that is unknown, as by default."""
        return None

    def predict_memory(
        self,
        policy: PolicyConfig,
        num_ranks: int,
        *,
        trains: bool,
        keeps_reference: bool,
        on_gpu: bool,
        rows_per_prompt: int = 1,
    ) -> MemoryPlan | None:
        """Memory of the rank that will need most, for the largest microbatch that the section allows; None where that
        is unknown.

        Args:
            policy: section of the model.
            num_ranks: processes that will hold it.
            trains: whether it has an optimizer.
            keeps_reference: whether its initial weights are kept.
            on_gpu: whether each rank has a GPU.
            rows_per_prompt: sequences of a batch that begin with the same prompt.
        """
        memory = self.rank_memory()
        if memory is None:
            return None
        from nemo_rl.models.huggingface.load import load_model_config

        tokens = microbatch_tokens(policy, trains=trains)
        keys = keys_per_token(policy, rows_per_prompt)
        work = Work(tokens, trains=trains, keeps_reference=keeps_reference, on_cpu=not on_gpu, keys_per_token=keys)
        model = load_model_config(policy.model_name, policy.hf_config_overrides)
        return memory.predict(policy, ParallelLayout.of(policy, num_ranks), model, work)

    @abstractmethod
    def complete_checkpoint(self, weights: Path, tokenizer: "PreTrainedTokenizerBase", precision: str | None) -> None:
        """Add to a checkpoint that all ranks have written what one process writes.

        Args:
            weights: the folder that the ranks wrote.
            tokenizer: belongs beside the weights where that makes a folder that can be loaded.
            precision: also leave a Hugging Face model in this format to hand on; None does not.
        """

    @abstractmethod
    def checkpoint_bytes(self, policy: PolicyConfig, checkpointing: CheckpointingConfig) -> int | None:
        """Bytes that the disk needs for the first checkpoint, at least; None where that is unknown."""

    @abstractmethod
    def find_weights(self, path: Path) -> Path:
        """The weights folder of a checkpoint, from it or from a folder above it.

        Raises:
            CheckpointError: there is none.
        """

    @abstractmethod
    def export(self, weights: Path, target: Path, tokenizer_name: str | None = None, dtype: str | None = None) -> None:
        """Write a folder that `from_pretrained` and engines load.

        Args:
            weights: what `find_weights` returns.
            target: a new or empty folder.
            tokenizer_name: tokenizer for checkpoints that have none.
            dtype: number format of floating-point weights; None keeps that of the checkpoint.

        Raises:
            CheckpointError: the target holds files already, or the checkpoint lacks something.
        """

    @abstractmethod
    def verify_export(self, weights: Path, target: Path) -> "ExportCheck":
        """Compare what an exported model answers with what the checkpoint answers."""


BACKEND_CLASSES: Registry[TrainingBackend] = Registry("training backend", TrainingBackend, BACKENDS)


def training_backend(policy: PolicyConfig) -> TrainingBackend:
    """The backend that a policy section asks for.

    Raises:
        ConfigError: none is enabled, or `training_backend.name` is no class of one.
    """
    own = policy.training_backend
    backend = _make(own.name if own else None, [name for name in BACKENDS if getattr(policy, name).enabled])
    if own is not None:
        check_own_keys(type(backend), "policy.training_backend.kwargs", own.kwargs)
    return backend


def backend_of_checkpoint(path: Path, config_file: Path | None = None) -> TrainingBackend:
    """The backend that wrote a checkpoint, by the configuration in its step folder; the library's own without one.

    Args:
        path: a step folder or a folder in it.
        config_file: that configuration, where it is elsewhere.

    Raises:
        CheckpointError: the file is no configuration of a run.
        ConfigError: the backend cannot be imported.
    """
    folder = path.expanduser().absolute()
    places = [config_file] if config_file else [above / "config.yaml" for above in (folder, *folder.parents[:3])]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        return _make(None, list(BACKENDS))
    content = yaml.safe_load(found.read_text(encoding="utf-8"))
    policy = content.get("policy") if isinstance(content, dict) else None
    if not isinstance(policy, dict):
        raise CheckpointError(f"{str(found)!r} has no policy.model_name, so it is no configuration of a run.")
    own = policy.get("training_backend")
    default = next(iter(BACKENDS))
    enabled = [name for name in BACKENDS if (policy.get(name) or {}).get("enabled", name == default)]
    return _make(own["name"] if own else None, enabled)


def _make(own: str | None, enabled: Sequence[str]) -> TrainingBackend:
    """The user's backend by its dotted name, or else that of the first enabled section."""
    if own is None and not enabled:
        keys = " or ".join(f"policy.{name}.enabled=true" for name in BACKENDS)
        raise ConfigError(f"no training backend is enabled: set {keys}.")
    name = own or enabled[0]
    return BACKEND_CLASSES.make(name, "policy.training_backend", {})


def convert_dcp_to_hf(
    dcp_ckpt_path: str | Path,
    hf_ckpt_path: str | Path,
    model_name_or_path: str | None = None,
    tokenizer_name_or_path: str | None = None,
    overwrite: bool = False,
    hf_overrides: Mapping[str, Any] | None = None,
) -> str:
    """Export a checkpoint as a Hugging Face folder, with NeMo RL's arguments.

    Args:
        dcp_ckpt_path: a step folder, or its `policy/weights`.
        hf_ckpt_path: folder for the model.
        model_name_or_path: not needed: a checkpoint says what model it is.
        tokenizer_name_or_path: tokenizer for checkpoints that have none.
        overwrite: replace the folder once the export is complete, if it exists; else it must be new or empty.
        hf_overrides: values for the exported `config.json`.

    Returns:
        `hf_ckpt_path`.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or the folder holds files.
    """
    source, target = Path(dcp_ckpt_path), Path(hf_ckpt_path)
    backend = backend_of_checkpoint(source)
    weights = backend.find_weights(source)
    if overwrite and weights.absolute().is_relative_to(target.absolute()):
        raise CheckpointError(f"hf_ckpt_path={str(target)!r} holds the checkpoint itself. Give another folder.")
    made = target.with_name(f"{target.name}.part") if overwrite else target
    backend.export(weights, made, tokenizer_name_or_path)
    if hf_overrides:
        config = made / "config.json"
        content = json.loads(config.read_text(encoding="utf-8")) | dict(hf_overrides)
        config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if overwrite:
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    return str(hf_ckpt_path)
