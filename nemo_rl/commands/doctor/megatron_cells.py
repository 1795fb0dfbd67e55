"""Train a small model with Megatron Core on the ranks of a mesh, and compare it with transformers in one process.

    SmallModel ─► check of the sizes ─► MegatronJob ─► ranks: exported weights, scores, loss, norm, one step ─► found

The ranks of a mesh run several jobs, because starting Megatron Core takes longer than a job. If they fail, the first
job without results is the cause, and new ranks run the jobs after it.

Invariant: all exported weights are compared, bit for bit with the files before the step, and after a step of plain SGD
with those that transformers' gradients give. So a wrong gradient of any parameter is found.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from nemo_rl.commands.doctor.model_cells import PACKED, PADDED, Cell, TrialResult
from nemo_rl.config import MegatronConfig, PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.host.boundary import in_background
from nemo_rl.models.dtensor.build import Found
from nemo_rl.models.dtensor.proof.children import Failure, answers
from nemo_rl.models.dtensor.proof.mesh_proof import join_ranks
from nemo_rl.models.dtensor.proof.numbers import Reference, Task, one_process
from nemo_rl.models.huggingface.folders import TENSOR_FILES
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.models.megatron.model.families import MODEL_TYPES, text_part
from nemo_rl.models.megatron.training_backend import MegatronTraining
from nemo_rl.models.training.inputs import InputLayout, build_training_inputs
from nemo_rl.utils.errors import ConfigError, DeadlineExceededError

PART = "Megatron Core"
_CPU = torch.device("cpu")
_START_S, _JOB_S = 180.0, 60.0
"""Deadline of the ranks of a mesh: for their start, and for each job."""
_TOLERANCE = 1e-4
"""Largest accepted relative difference of a log-probability, the loss and the norm of the gradient in float32. Without
the gradients of its routers, the norm of a small DeepSeek-V3 differs by 4e-4."""
_STEP_TOLERANCE = 1e-3
"""Largest accepted difference of a weight after the step, as a fraction of its tensor's largest step."""
_NEGLIGIBLE = 1e-3
"""Steps of tensors whose true gradient is zero (biases of keys) are compared with this share of the largest step."""
_TP, _SP = {"tensor_model_parallel_size": 2}, {"sequence_parallel": True}
_CP, _PP, _EP = (
    {"context_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"expert_model_parallel_size": 2},
)
ONE_RANK = "one rank"
MEGATRON_MESHES: Mapping[str, tuple[Mapping[str, Any], int]] = {
    ONE_RANK: ({}, 1),
    "TP 2": (_TP, 2),
    "TP 2 with SP": (_TP | _SP, 2),
    "CP 2": (_CP, 2),
    "PP 2": (_PP, 2),
    "EP 2": (_EP, 2),
    "TP 2 x PP 2": (_TP | _SP | _PP, 4),
}
"""Keys of `policy.megatron_cfg` and number of ranks, by name. Megatron Core trains experts on tensor-parallel ranks
only with sequence parallelism, so the last mesh has it."""
SETTINGS: dict[str, Any] = {
    "optimizer": {
        "optimizer": "sgd",
        "lr": 1.0,
        "min_lr": 0.0,
        "weight_decay": 0.0,
        "sgd_momentum": 0.0,
        "clip_grad": 0.0,
        "use_distributed_optimizer": False,
    },
    "scheduler": {"lr_decay_style": "constant", "lr_decay_iters": None, "lr_warmup_iters": 0, "lr_warmup_init": 0.0},
    "moe_router_dtype": "fp64",
    "freeze_moe_router": False,
}
"""Settings with which all weights have gradients, a step subtracts the gradient, and experts are chosen as in the
reference."""


@dataclass
class SmallModel:
    """A small model with weights, in memory and in a folder, and what transformers computes with it."""

    name: str
    """Name for messages."""
    base: PolicyConfig
    """Policy section whose `model_name` has the sizes that are checked."""
    hf: Any
    folder: str
    """Folder with the model's files."""
    _expected: "dict[int, Expected]" = field(default_factory=dict)

    def job(self, mesh: str, rows: str) -> "MegatronJob":
        """Check the sizes of a mesh, and return the job to run on its ranks.

        Raises:
            ConfigError: Megatron Core cannot train the model on this mesh.
        """
        sizes, ranks = MEGATRON_MESHES[mesh]
        policy = self._policy(sizes, packed=rows == PACKED)
        small = policy.model_copy(update={"model_name": self.folder})
        for section in (policy, small):
            MegatronTraining().check_sizes(section, ranks)
        layout = ParallelLayout.of(small, ranks)
        task = Task(self.hf, small, layout, Found("eager", shares_prompts=False, transform=None))
        return MegatronJob(task, self._of_one_process(task))

    def _policy(self, sizes: Mapping[str, Any], *, packed: bool) -> PolicyConfig:
        changed = {
            "megatron_cfg": MegatronConfig.build(enabled=True, **SETTINGS, **sizes),
            "dtensor_cfg": self.base.dtensor_cfg.model_copy(update={"enabled": False}),
            "sequence_packing": self.base.sequence_packing.model_copy(
                update={"enabled": packed, "share_prompts": False}
            ),
            "precision": "float32",
            "generation": None,
            "max_grad_norm": None,
        }
        return self.base.model_copy(update=changed)

    def _of_one_process(self, task: Task) -> "Expected":
        number = task.layout.data_parallel_size
        if number not in self._expected:
            self._expected[number] = Expected.of(task)
        return self._expected[number]


@dataclass(frozen=True)
class Expected:
    """Numbers of transformers in one process."""

    reference: Reference
    before: Mapping[str, Tensor]
    """Tensors of the files."""
    after: Mapping[str, Tensor]
    """The same tensors after the step."""

    @classmethod
    def of(cls, task: Task) -> "Expected":
        """Compute the numbers, and write the model after the step to read its tensors by the names of files."""
        reference, stepped = one_process(task), deepcopy(task.probe_model)
        with torch.no_grad():
            for name, parameter in stepped.named_parameters():
                parameter.sub_(reference.gradients[name].to(parameter.dtype))
        with tempfile.TemporaryDirectory(prefix="nrl-small-") as folder:
            stepped.save_pretrained(folder)
            return cls(reference, _tensors_in(Path(task.policy.model_name)), _tensors_in(Path(folder)))


def _tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob(TENSOR_FILES) for name, tensor in load_file(file).items()}


@dataclass(frozen=True)
class MegatronJob:
    """A model on a mesh, with the numbers to compare."""

    task: Task
    expected: Expected


def megatron_cells(model: SmallModel) -> Iterator[Cell]:
    """Yield a cell for each mesh and each layout of rows, or only those of one rank for an unknown type."""
    known = text_part(load_model_config(model.base.model_name)).model_type in MODEL_TYPES
    for mesh in MEGATRON_MESHES if known else [ONE_RANK]:
        for _, cell in cells_of_mesh(mesh, [model]):
            yield cell


def cells_of_mesh(mesh: str, models: Sequence[SmallModel]) -> Iterator[tuple[SmallModel, Cell]]:
    """Yield the cells of several models on one mesh. Refusals are first, and then the jobs in order."""
    jobs: list[MegatronJob] = []
    places: list[tuple[SmallModel, str]] = []
    for model in models:
        for rows in (PADDED, PACKED):
            asked = _asked(model, mesh, rows)
            if isinstance(asked, Cell):
                yield model, asked
            else:
                jobs.append(asked)
                places.append((model, asked_as(mesh, rows)))
    for (model, what), found in zip(places, results_of(jobs, MEGATRON_MESHES[mesh][1]), strict=True):
        yield model, _judged(what, found)


def asked_as(mesh: str, rows: str) -> str:
    """Return the setting of a cell."""
    return f"{mesh}, {rows}"


def _asked(model: SmallModel, mesh: str, rows: str) -> MegatronJob | Cell:
    """Return the job, or the cell of a refusal, of a failed check or of a missing package."""
    what = asked_as(mesh, rows)
    asked = in_background(partial(model.job, mesh, rows), f"doctor: {PART}, {what}")  # the code of any architecture
    error = asked.exception(_START_S)
    if isinstance(error, ConfigError):
        return Cell(PART, what, TrialResult.REFUSED, str(error))
    if error is not None:
        return Cell(PART, what, TrialResult.FAILED, f"{type(error).__name__}: {error}")
    if find_spec("megatron") is None:
        return Cell(PART, what, TrialResult.SKIPPED, "needs the extra mcore")
    return asked.result()


def _judged(what: str, found: dict[str, float] | Failure) -> Cell:
    if isinstance(found, Failure):
        return Cell(PART, what, TrialResult.REFUSED if found.refused else TrialResult.FAILED, found.what)
    seconds = found.pop(_SECONDS)
    wrong = {name: worst for name, worst in found.items() if not worst <= _allowed(name)}
    if wrong:
        name, worst = max(wrong.items(), key=lambda item: (item[0].startswith(_EXPORTED), item[1]))
        return Cell(PART, what, TrialResult.FAILED, f"{name} differs by {worst:.1e} of its size", worst, seconds)
    return Cell(PART, what, TrialResult.RIGHT, "float32", max(found.values()), seconds)


_SECONDS, _REFUSAL = "seconds", "refused"
_EXPORTED, _OF_THE_STEP = "the exported ", "the step of "


def _allowed(name: str) -> float:
    return _STEP_TOLERANCE if name.startswith(_OF_THE_STEP) else _TOLERANCE


def results_of(jobs: Sequence[MegatronJob], ranks: int) -> Iterator[dict[str, float] | Failure]:
    """Run jobs on the ranks of one mesh, and yield the largest relative differences of each by name, or its failure."""
    first = 0
    while first < len(jobs):
        with tempfile.TemporaryDirectory(prefix="nrl-ranks-") as folder:
            work = partial(_run_jobs, jobs, first, ranks, Path(folder))
            failure = _failure_of(work, ranks, _START_S + _JOB_S * (len(jobs) - first))
            while first < len(jobs) and (found := _joined(Path(folder), first, ranks)) is not None:
                yield found
                first += 1
        if first < len(jobs):
            yield failure or Failure("its ranks gave no result", raised=True)
            first += 1


def _failure_of(work: Any, ranks: int, deadline_s: float) -> Failure | None:
    try:
        found = answers(work, ranks, deadline_s, own_group=True)
    except DeadlineExceededError as error:
        return Failure(str(error), raised=True)
    return found if isinstance(found, Failure) else None


def _joined(folder: Path, number: int, ranks: int) -> dict[str, float] | Failure | None:
    """Return the largest numbers of all ranks for a job, or None if a rank has not finished it."""
    files = [folder / f"{number}-{rank}.json" for rank in range(ranks)]
    if not all(file.exists() for file in files):
        return None
    of_ranks = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    refusal = next((found[_REFUSAL] for found in of_ranks if _REFUSAL in found), None)
    if refusal is not None:
        return Failure(refusal, refused=True)
    return {name: max(found.get(name, 0.0) for found in of_ranks) for name in {*of_ranks[0]}.union(*of_ranks)}


def _run_jobs(jobs: Sequence[MegatronJob], first: int, ranks: int, folder: Path, rank: int) -> None:
    """Run jobs on this rank, and write what is found of each to a file.

    Each job has new groups of ranks, because the threads of gloo run as long as their group exists.
    """
    for number in range(first, len(jobs)):
        began, found = time.monotonic(), dict[str, Any]()
        join_ranks(folder / f"store-{number}", rank, ranks)
        try:
            found = differences(jobs[number], rank)
            dist.barrier()
        except ConfigError as error:
            found = {_REFUSAL: str(error)}
        finally:
            dist.destroy_process_group()
        found[_SECONDS] = time.monotonic() - began
        part = folder / f"{number}-{rank}.part"
        part.write_text(json.dumps(found), encoding="utf-8")
        part.rename(part.with_suffix(".json"))


def differences(job: MegatronJob, rank: int) -> dict[str, float]:
    """Return the relative differences of Megatron Core from transformers on this rank, by name. Ranks call together."""
    from nemo_rl.models.megatron.backend import MegatronBackend
    from nemo_rl.models.megatron.parallel import stop_model_parallel

    stop_model_parallel()  # the groups of the job before
    backend = MegatronBackend(job.task.policy, _CPU, job.task.layout, init_reference_model=False)
    return _converted(backend, job.expected) | _trained(backend, job, rank) | _stepped(backend, job.expected)


def _converted(backend: Any, expected: Expected) -> dict[str, float]:
    """Compare the exported weights with the files, which must be equal bit for bit."""
    files, exported = expected.before, dict(backend.iterate_weights())
    missing = files.keys() ^ exported.keys()
    changed = [name for name in files.keys() & exported.keys() if not torch.equal(files[name], exported[name])]
    return dict.fromkeys([f"{_EXPORTED}{name}" for name in [*missing, *changed]], 1.0)


def _trained(backend: Any, job: MegatronJob, rank: int) -> dict[str, float]:
    """Compare the scores of this rank, and the loss and the norm of all ranks, and make a step."""
    task, reference = job.task, job.expected.reference
    place = task.layout.data_parallel_rank(rank)
    rows = list(task.microbatches(place))
    inputs = [build_training_inputs(each, InputLayout(task.policy.sequence_packing.enabled), _CPU) for each in rows]
    errors: list[float] = []
    losses: list[float] = []

    def train(index: int, scores_K: Tensor, entropy_K: Tensor) -> Tensor:
        scores, wanted = inputs[index].scatter(scores_K), reference.scores[place, index]
        errors.append(float((scores.detach() - wanted).abs().max() / wanted.abs().max()))
        loss = -(scores * rows[index]["weights"]).sum()
        losses.append(loss.item())
        return loss

    backend.run(inputs, train, backward=True)
    counts = rank in task.layout.result_ranks
    total = torch.tensor(sum(losses) if counts else 0.0, dtype=torch.float64)
    dist.all_reduce(total)
    norm, _ = backend.clip_and_step()
    return {
        "a log-probability": max(errors, default=0.0),
        "the loss": abs(total.item() - reference.loss) / max(abs(reference.loss), 1.0),
        "the gradient's norm": abs(norm - reference.norm) / reference.norm,
    }


def _stepped(backend: Any, expected: Expected) -> dict[str, float]:
    """Compare the exported weights after the step with those of transformers."""
    exported = dict(backend.iterate_weights())
    names = expected.after.keys() & exported.keys()
    steps = {name: float((expected.after[name] - expected.before[name]).abs().max()) for name in names}
    least = _NEGLIGIBLE * max(steps.values())
    return {
        f"{_OF_THE_STEP}{name}": float((exported[name] - expected.after[name]).abs().max()) / max(steps[name], least)
        for name in names
    }
