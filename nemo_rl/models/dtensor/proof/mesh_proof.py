"""Prove on a small model, before a run starts, that a mesh gives the same numbers as one process.

    driver ── proven already? ──► done
       └─ fork ─► prover: small model, features of its architecture, numbers of one process
                     └─ fork ─► the ranks of a small mesh: numbers of `DTensorBackend`, compared

All computations run on CPUs, within `TIMEOUT_S`, in child processes whose crash does not affect the driver. Invariant:
a mesh is accepted only if loss, scores, gradient norm and every gradient agree, and the result depends only on the
values that `digest` hashes.

Proofs that succeeded are stored on the machine for all runs of a user. Each proof is one empty file, named by the
digest of everything that the proof depends on, including the code. Creating a file is atomic, so concurrent runs do not
conflict.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import PretrainedConfig

import nemo_rl
from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.dtensor.mesh_check import needs_proof
from nemo_rl.models.dtensor.proof.children import Failure, answers
from nemo_rl.models.dtensor.proof.small import SmallMesh, small_model, small_policy
from nemo_rl.utils.errors import ConfigError, DeadlineExceededError

logger = logging.getLogger(__name__)

_CODE = ("config/rules", "distributed", "models/attention", "models/dtensor", "models/huggingface", "models/*.py")
"""Files of the library whose code a proof runs."""
_PARALLEL_KEYS = (
    "sequence_parallel",
    "context_parallel_method",
    "custom_parallel_plan",
    "activation_checkpointing",
    "lora_cfg",
)
_OF_THE_RUN = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def digest(policy: PolicyConfig, mesh: SmallMesh, model: PretrainedConfig) -> str:
    """Return a digest of the model's configuration, the small mesh, configuration keys and versions of the code."""
    section = policy.dtensor_cfg.model_dump(mode="json", include={*_PARALLEL_KEYS})
    shape = {name: value for name, value in model.to_dict().items() if name not in _OF_THE_RUN}
    ingredients: list[Any] = [
        shape,
        section,
        mesh.layout.shape,
        mesh.layout.ep,
        mesh.virtual,
        policy.sequence_packing.enabled and policy.sequence_packing.share_prompts,
        policy.sequence_packing.enabled,
        policy.reward_model_cfg.enabled,
        policy.max_total_sequence_length,
        _context(policy),
        torch.__version__,
        transformers.__version__,
        _code(),
    ]
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _context(policy: PolicyConfig) -> int | None:
    engine = policy.generation.engine if policy.generation is not None else None
    return None if engine is None else engine.max_model_len


@cache
def _code() -> str:
    """Return a digest of the source files that a proof runs."""
    package = Path(nemo_rl.__file__).parent
    total = hashlib.sha256()
    for pattern in _CODE:
        files = package.glob(pattern) if "*" in pattern else (package / pattern).rglob("*.py")
        for file in sorted(files):
            total.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    return total.hexdigest()


def folder() -> Path:
    """Return the folder of the proofs, below XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "nemo_rl" / "proven_meshes"


def is_proven(number: str) -> bool:
    """Return whether the proof with this digest is stored."""
    try:
        return (folder() / number).exists()
    except OSError:
        return False


def remember(number: str) -> None:
    """Store a proof. If the folder cannot be written, the next run has to repeat the proof."""
    try:
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder() / number).touch()
    except OSError as error:
        logger.debug("Cannot store the proof of this mesh: %s.", error)


TIMEOUT_S = 600.0
_RANKS_S = 240.0
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest accepted relative difference, by the dtype in which the small model computes. Another order of sums changes
gradients by up to 1e-12 in float64, and 1e-4 in float32. In a wrong mesh, a term of a sum is missing, repeated or from
another token. With a few dozen tokens, two heads and four experts, the difference is then 1e-3 or more."""
_AXES = ("pp", "cp", "tp", "ep")
_ADVICE = ("Set ", "Check ", "choose ")


def prove_mesh(policy: PolicyConfig, layout: ParallelLayout, model: PretrainedConfig, section: str = "policy") -> None:
    """Prove that a mesh is correct. Nothing is computed if a proof is stored or if the mesh needs no proof.

    Args:
        layout: axis sizes, from the section and the number of ranks.
        model: the model's configuration.
        section: name of the section, for messages.

    Raises:
        ConfigError: the architecture cannot be divided in this way, or mesh and one process give different numbers.
    """
    if not needs_proof(policy, layout, model):
        return
    mesh = SmallMesh.of(policy, layout)
    question = _ProofQuestion(policy, mesh, model)
    number = digest(policy, mesh, model)
    if is_proven(number):
        return
    logger.info(
        "Proving %s on a small model of %s (a few seconds, once per mesh and model).", question.name, model.model_type
    )
    failure = question.failure()
    if failure is None:
        remember(number)
        return
    message = question.refusal(failure)
    place = f"{section}.dtensor_cfg" if mesh.layout.num_ranks > 1 else section
    raise ConfigError(message if message.startswith(f"{section}.") else f"{place}: {message}")


@dataclass(frozen=True)
class Proof:
    """Result of a comparison whose numbers agree."""

    difference: float
    """Largest relative difference of the loss, a score, a gradient or the gradients' norm."""
    dtype: torch.dtype
    """Dtype in which both sides computed."""
    shares_prompts: bool
    """Whether the ranks stored a prompt that several rows share only once."""


def proof_of(policy: PolicyConfig, layout: ParallelLayout, model: PretrainedConfig) -> Proof | Failure:
    """Compare a mesh with one process on a small model, whether or not a proof is stored.

    Args:
        layout: axis sizes, from the section and the number of ranks. One rank proves the layout of the rows.
        model: the model's configuration.

    Returns:
        The proof, or a failure with the message of a run.
    """
    question = _ProofQuestion(policy, SmallMesh.of(policy, layout), model)
    found = question.answer()
    return replace(found, what=question.refusal(found)) if isinstance(found, Failure) else found


@dataclass(frozen=True)
class _ProofQuestion:
    """A mesh to prove, with its model."""

    policy: PolicyConfig
    mesh: SmallMesh
    model: PretrainedConfig

    @property
    def name(self) -> str:
        """Return the configuration keys that are proven, as its name."""
        return " x ".join(_keys(self.policy)) or "sequence_packing.enabled=true"

    def failure(self) -> Failure | None:
        """Return why the mesh is not correct, or None if it is correct."""
        found = self.answer()
        return found if isinstance(found, Failure) else None

    def answer(self) -> Proof | Failure:
        """Compare the mesh with one process, in a child process."""
        try:
            found = answers(lambda _: _prove(self), 1, TIMEOUT_S, own_group=True)
        except DeadlineExceededError:
            return Failure(f"it gave no answer within {TIMEOUT_S:g} s")
        return found if isinstance(found, Failure) else found[0]

    def refusal(self, failure: Failure) -> str:
        """Return the error message for the user."""
        if failure.refused:
            advised = any(word in failure.what for word in _ADVICE)
            return failure.what if advised else f"{failure.what} Set {_alone(self.policy)}."
        return (
            f"{self.name} is not right for {self.model.model_type}: on a small model of this architecture, compared "
            f"with one process, {failure.what}. {self._way_out()}"
        )

    def _way_out(self) -> str:
        """Return advice that names each setting whose change alone gives a correct mesh."""
        fine = [keys for keys, question in self._simpler() if question is None or question.failure() is None]
        return f"Set {' or '.join(fine) or _alone(self.policy)}."

    def _simpler(self) -> Iterator[tuple[str, "_ProofQuestion | None"]]:
        for keys, changes in _changes(self.policy).items():
            section = self.policy.dtensor_cfg.model_copy(update=changes)
            policy = self.policy.model_copy(update={"dtensor_cfg": section})
            sizes = {axis: section.size(axis) for axis in _AXES}
            alone = all(size == 1 for size in sizes.values())
            ranks = ParallelLayout(**sizes)
            yield keys, None if alone else _ProofQuestion(policy, SmallMesh.of(policy, ranks), self.model)


def _keys(policy: PolicyConfig) -> Iterator[str]:
    """Yield the settings that divide the model, as configuration keys."""
    section = policy.dtensor_cfg
    for axis in _AXES:
        if section.size(axis) > 1:
            yield f"{section.size_keys[axis]}={section.size(axis)}"
    if section.sequence_parallel and section.tensor_parallel_size > 1:
        yield "sequence_parallel=true"


def _changes(policy: PolicyConfig) -> Mapping[str, dict[str, Any]]:
    """Return the changes of one setting that divide the model less, as `{setting: updated fields}`."""
    section = policy.dtensor_cfg
    ways: dict[str, dict[str, Any]] = {}
    if section.sequence_parallel and section.tensor_parallel_size > 1:
        ways["sequence_parallel=false"] = {"sequence_parallel": False}
    for axis in _AXES:
        if section.size(axis) > 1:
            ways[f"{section.size_keys[axis]}=1"] = {section.size_keys[axis]: 1}
    return ways


def _alone(policy: PolicyConfig) -> str:
    """Return the advice to set all axes to one rank, for the case that no single change helps."""
    axes = [axis for axis in _AXES if policy.dtensor_cfg.size(axis) > 1]
    return " and ".join(f"{policy.dtensor_cfg.size_keys[axis]}=1" for axis in axes) or "sequence_packing.enabled=false"


def _prove(question: _ProofQuestion) -> Proof | Failure:
    """Compare one process with the ranks of the small mesh, in the prover process.

    Both compute in float64, which shows small errors, or in float32 if the architecture raises an error in float64.
    Models with experts are compared in float32 as well, because grouped matrix products do not support float64.
    """
    from nemo_rl.models.dtensor.build import longest_sequence, try_out
    from nemo_rl.models.dtensor.expert_parallel import find_experts
    from nemo_rl.models.dtensor.proof.numbers import Task, in_float64

    policy = small_policy(question.policy, question.mesh)
    small = small_model(question.model, policy, question.mesh)
    found = try_out(small, longest_sequence(question.policy), policy)
    single, double = (Task(model, policy, question.mesh.layout, found) for model in (small, deepcopy(small).double()))
    with in_float64():
        answer = _compared(double, torch.float64)
    if answer.raised if isinstance(answer, Failure) else bool(find_experts(small)):
        answer = _compared(single, torch.float32)
    return answer


def _compared(task: Any, dtype: torch.dtype) -> Proof | Failure:
    """Compare the ranks with one process, both in a dtype."""
    from nemo_rl.models.dtensor.proof.numbers import RankNumbers, one_process

    try:
        reference = one_process(task)
    except ConfigError as error:
        return Failure(str(error), refused=True)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        return Failure(f"one process failed ({type(error).__name__}: {str(error).splitlines()[0]})", raised=True)
    with tempfile.TemporaryDirectory(prefix="nrl-proof-") as folder:
        work = partial(_on_rank, task, reference, Path(folder) / "store")
        try:
            found = answers(work, task.layout.num_ranks, _RANKS_S)
        except DeadlineExceededError:
            return Failure(f"its ranks gave no answer within {_RANKS_S:g} s")
    if isinstance(found, Failure):
        return found if found.refused else Failure(f"a rank failed ({found.what})", raised=True)
    ranks: list[RankNumbers] = found
    return _largest(reference, ranks, Proof(0.0, dtype, task.found.shares_prompts))


def _on_rank(task: Any, reference: Any, store: Path, rank: int) -> Any:
    from nemo_rl.models.dtensor.proof.numbers import on_mesh

    join_ranks(store, rank, task.layout.num_ranks)
    return on_mesh(task, reference)


def join_ranks(store: Path, rank: int, size: int) -> None:
    """Make this process a rank of a gloo group on this machine, whose ranks meet through a new file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=_RANKS_S)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size, timeout=limit)


def _largest(reference: Any, ranks: list[Any], proof: Proof) -> Proof | Failure:
    """Return the proof with the largest difference, or the first and largest one that its dtype does not allow."""
    loss, norm = sum(rank.loss for rank in ranks), ranks[0].norm
    gradients = {name: error for rank in ranks for name, error in rank.gradients.items()}
    for rank in ranks:
        gradients.update({name: max(error, gradients[name]) for name, error in rank.gradients.items()})
    missing = sorted(reference.gradients.keys() - gradients.keys())
    scale = max(abs(reference.loss), sum(float(each.abs().max()) for each in reference.scores.values()))
    found = {
        "the loss": abs(loss - reference.loss) / scale,
        "a score": max(rank.scores for rank in ranks),
    }
    found |= {f"the gradient of {name}": error for name, error in gradients.items()}
    found |= {f"the gradient of {name}, which no rank has,": 1.0 for name in missing}
    found["the gradient's norm"] = abs(norm - reference.norm) / reference.norm if reference.norm else 0.0
    wrong = {name: error for name, error in found.items() if not error <= TOLERANCES[proof.dtype]}
    if not wrong:
        return replace(proof, difference=max(found.values()))
    first, worst = next(iter(wrong)), max(wrong, key=lambda name: wrong[name])
    told = [first] if first == worst else [first, worst]
    return Failure(" and ".join(f"{name} differs by {wrong[name]:.1e} of its size" for name in told))
