"""The models of a run: the policy, and whatever else trains or scores beside it.

A run names its models, for example `{"policy": ..., "teacher": ...}`. Each is a `Policy` with a section of its own;
which of them trains is a value here. Invariant: what has been started is registered for the end of the run before
anything is done with it.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.setup.preflight import SECTIONS
from nemo_rl.config import ClusterConfig, MasterConfig, PolicyConfig
from nemo_rl.distributed.cluster.node_checks import Shared, check_nodes
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.policy.lm_policy import Policy


@dataclass(frozen=True)
class Role:
    """A model of a run.

    Attributes:
        section: its keys.
        trains: has an optimizer and is saved in checkpoints; else it is frozen, for inference only.
        keeps_reference: keep the initial weights for reference log-probabilities.
    """

    section: PolicyConfig
    trains: bool = True
    keeps_reference: bool = False


def start_role(
    name: str,
    role: Role,
    where: RayVirtualCluster,
    cluster: ClusterConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    resume_path: Path | None = None,
) -> Policy:
    """Start the ranks of a model, from its own weights or a checkpoint; blocks until they are ready.

    Args:
        name: of the model in the run.
        role: what it is.
        where: bundles for the ranks.
        cluster: deadlines and threads.
        tokenizer: saved beside its weights.
        seed: of the run.
        resume_path: step folder of a checkpoint; None starts from `section.model_name`.
    """
    saved = resume_path / name if resume_path and role.trains else None
    has_optimizer = saved is not None and (saved / "optimizer").exists()
    return Policy(
        where,
        role.section,
        tokenizer,
        name_prefix="lm_policy" if name == "policy" else name,
        weights_path=saved / "weights" if saved else None,
        optimizer_path=saved / "optimizer" if saved and has_optimizer else None,
        init_optimizer=role.trains,
        init_reference_model=role.keeps_reference,
        timeouts=cluster.timeouts,
        threads_per_rank=cluster.threads_per_rank,
        seed=seed,
        venv=cluster.venvs.get("policy"),
        optimizations=cluster.optimizations,
    )


class Closable(Protocol):
    """Something that holds processes."""

    def shutdown(self) -> Any:
        """End them."""


def start_together(starts: Mapping[str, Callable[[], Closable]], resources: ExitStack) -> dict[str, Any]:
    """Start several things side by side; blocks until all have started or failed.

    Args:
        starts: by name; each is ended in reverse order.
        resources: where they are registered, also when another one fails.

    Raises:
        Exception: the first failure; its notes name the others.
    """
    with ThreadPoolExecutor(max_workers=len(starts)) as pool:
        futures = {name: pool.submit(start) for name, start in starts.items()}
    failures: dict[str, BaseException] = {}
    for name, future in futures.items():
        failure = future.exception()
        if failure is None:
            resources.callback(future.result().shutdown)
        else:
            failures[name] = failure
    if failures:
        (first, failure), *others = failures.items()
        failure.add_note(f"This kept {first!r} from starting.")
        for name, other in others:
            failure.add_note(f"{name!r} did not start either: {type(other).__name__}: {other}")
        raise failure
    return {name: future.result() for name, future in futures.items()}


def reserve(clusters: Iterable[RayVirtualCluster], config: MasterConfig, resources: ExitStack) -> None:
    """Reserve all bundles of a run, and compare their nodes, before the first worker.

    Raises:
        ResourceInsufficientError: the cluster does not have them.
        ConfigError, DeadlineExceededError: see `node_checks.check_nodes`.
    """
    different = list({id(cluster): cluster for cluster in clusters}.values())
    for cluster in different:
        resources.callback(cluster.shutdown)
        cluster.get_placement_groups()
    check_nodes(different, _shared(config))


def _shared(config: MasterConfig) -> Shared:
    """The folders that every machine of a run has to see."""
    folders: dict[str, str] = {}
    for section, model in zip(SECTIONS, config.models, strict=False):
        folders |= {f"{section}.model_name": model.model_name, f"{section}.tokenizer.name": model.tokenizer.name}
    if not config.checkpointing.enabled:
        return Shared(folders)
    # Workers may have another working directory, and ranks write where `CheckpointManager` says. `load_config` has made
    # the models' folders absolute.
    saved = Path(config.checkpointing.checkpoint_dir).absolute()
    return Shared(folders, ("checkpointing.checkpoint_dir", str(saved)))
