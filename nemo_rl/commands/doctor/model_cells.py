"""Try the ways to train and sample a model on a small copy of its architecture.

    configuration ─► Trial ─► check of the real sizes ─► small model against transformers in one process ─► Cell
                        └──► Megatron Core and engines: the small model in a folder (`small_copy`)

The copy has random weights and one layer of each kind, so a trial takes seconds for a model of any size, and no weight
of the model is read. Invariant: a cell is `right` only if numbers were compared in this call. A failure of one trial
does not affect the others.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from transformers import PretrainedConfig

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.host.boundary import in_background
from nemo_rl.models.dtensor.proof.children import Failure
from nemo_rl.models.dtensor.proof.mesh_proof import Proof, proof_of
from nemo_rl.models.dtensor.training_backend import DTensorTraining
from nemo_rl.utils.errors import ConfigError, DeadlineExceededError

_DEADLINE_S = 1200.0


class TrialResult(StrEnum):
    """Result of a trial."""

    RIGHT = "right"
    REFUSED = "refused"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Cell:
    """One line of the table."""

    part: str
    """Subject: `training`, `LoRA`, `Megatron Core` or an engine."""
    what: str
    """Setting that was tried."""
    result: TrialResult
    """`failed` is an unexpected error. `skipped` needs a package that is not installed."""
    told: str = ""
    """Reason of a refusal, or the dtype of the comparison."""
    difference: float | None = None
    """Largest relative difference from transformers in one process; absolute for log-probabilities of engines."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Trial:
    """A way to train on DTensor ranks."""

    what: str
    """Name in the table."""
    packed: bool
    """Pack rows instead of padding them."""
    mesh: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `policy.dtensor_cfg`."""
    ranks: int = 1
    shared: bool = False
    """Store a prompt that several packed rows share only once."""
    part: str = "training"

    def policy(self, base: PolicyConfig) -> PolicyConfig:
        """Return the policy section of the trial."""
        packing = base.sequence_packing.model_copy(update={"enabled": self.packed, "share_prompts": self.shared})
        section = base.dtensor_cfg.model_copy(update=dict(self.mesh))
        return base.model_copy(update={"dtensor_cfg": section, "sequence_packing": packing})


_TP, _SP = {"tensor_parallel_size": 2}, {"sequence_parallel": True}
_CP, _PP, _EP = {"context_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"expert_parallel_size": 2}
MESHES: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "one rank": ({}, 1),
    "TP 2": (_TP, 2),
    "TP 2 with SP": (_TP | _SP, 2),
    "CP 2": (_CP, 2),
    "PP 2": (_PP, 2),
    "EP 2": (_EP, 2),
    "TP 2 x PP 2": (_TP | _PP, 4),
}
"""Keys of `policy.dtensor_cfg` and number of ranks, by name."""
PADDED, PACKED, SHARED = "padded", "packed", "shared prompts"


def trials(base: PolicyConfig) -> Iterator[Trial]:
    """Yield the trials of DTensor: rows and meshes, then adapters."""
    for name, (mesh, ranks) in MESHES.items():
        yield Trial(f"{name}, {PADDED}", False, mesh, ranks)
        yield Trial(f"{name}, {PACKED}", True, mesh, ranks)
    yield Trial(f"one rank, {SHARED}", True, shared=True)
    adapters = base.dtensor_cfg.lora_cfg.model_copy(update={"enabled": True})
    yield Trial(f"one rank, {PACKED}", True, {"lora_cfg": adapters}, part="LoRA")


def train_cell(base: PolicyConfig, model: PretrainedConfig, trial: Trial) -> Cell:
    """Check the model's sizes as a run does, and compare the copy on the ranks of a mesh with one process.

    Args:
        base: policy section whose `model_name` is a folder or an id that can be read here.
        model: the model's configuration.
    """
    policy = trial.policy(base)

    def tried() -> Proof | Failure:
        DTensorTraining().check_sizes(policy, trial.ranks)
        return proof_of(policy, ParallelLayout.of(policy, trial.ranks), model)

    return measured(trial.part, trial.what, lambda: _judged(trial, tried()))


def _judged(trial: Trial, answer: Proof | Failure) -> tuple[TrialResult, str, float | None]:
    if isinstance(answer, Failure):
        return TrialResult.REFUSED, answer.what, None
    if trial.shared and not answer.shares_prompts:
        return (
            TrialResult.REFUSED,
            "A prompt is stored once for each of its answers: with one copy, outputs differ.",
            None,
        )
    return TrialResult.RIGHT, str(answer.dtype).removeprefix("torch."), answer.difference


def measured(part: str, what: str, look: Callable[[], tuple[TrialResult, str, float | None]]) -> Cell:
    """Return the cell of a trial, with its seconds. A `ConfigError` is a refusal, other errors are failures."""
    began = time.monotonic()
    trial = in_background(look, f"doctor: {part}, {what}")  # the code of any architecture
    try:
        error = trial.exception(_DEADLINE_S)
    except TimeoutError:
        error = DeadlineExceededError(f"The trial gave no answer in {_DEADLINE_S:g} s.")
    if error is None:
        result, told, difference = trial.result()
    else:
        refused = isinstance(error, ConfigError)
        result, told, difference = TrialResult.REFUSED if refused else TrialResult.FAILED, str(error), None
        told = told if refused else f"{type(error).__name__}: {error}"
    return Cell(part, what, result, told, difference, time.monotonic() - began)
