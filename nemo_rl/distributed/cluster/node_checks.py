"""Check that all nodes of a run have the same code, the models' folders and the same checkpoint folder.

A Ray task on each node checks this before the first worker starts there. An error names a machine without the shared
disk within seconds, before a rank on it crashes. Invariants: if all workers are on this process's node, nothing is
checked. Every check has a deadline.
"""

import hashlib
import logging
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import nemo_rl
from nemo_rl.distributed.cluster.node_choice import living_nodes
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.utils.errors import ConfigError, DeadlineExceededError

logger = logging.getLogger(__name__)

_ANSWER_S = 120.0
"""Time limit in seconds for a node's answer: it starts Python, possibly from a network disk with a cold cache."""
_VISIBLE_S = 5.0
"""Seconds until a network disk shows a file of another machine."""


@dataclass(frozen=True)
class Shared:
    """Folders that the nodes of a run share."""

    folders: Mapping[str, str] = field(default_factory=dict)
    """Folders to read, by configuration key. Entries that are not folders on the driver (hub ids) are not checked."""
    written: tuple[str, str] | None = None
    """A key and the folder into which all ranks write. None if there is no such folder."""


@dataclass(frozen=True)
class _NodeQuestion:
    code: str
    folders: Mapping[str, str]
    written: str
    canary: Path | None
    patience_s: float


def check_nodes(places: Iterable[RayVirtualCluster], shared: Shared) -> None:
    """Compare the nodes of reserved places with this process's node, now and after every move of a place by Ray.

    Args:
        places: places in which workers will run.
        shared: folders that the workers need there.

    Raises:
        ConfigError: a node lacks something. The message names the nodes and what they lack.
        DeadlineExceededError: a node did not answer.
    """
    places, compared = list(places), {ray.get_runtime_context().get_node_id()}
    _compare_new_nodes(places, shared, compared)
    for cluster in places:
        cluster.compare_new_nodes = partial(_compare_new_nodes, [cluster], shared, compared)


def _compare_new_nodes(places: Iterable[RayVirtualCluster], shared: Shared, compared: set[str]) -> None:
    """Compare the nodes that are not in `compared`, and add them to it."""
    wanted = {node_id for cluster in places for node_id in cluster.node_ids()} - compared
    nodes = {node.node_id: node.address for node in living_nodes() if node.node_id in wanted}
    if not nodes:
        return
    folders = {key: path for key, path in shared.folders.items() if Path(path).is_dir()}
    with _canary(shared.written) as canary:
        question = _NodeQuestion(_code(), folders, shared.written[0] if shared.written else "", canary, _VISIBLE_S)
        found = _ask(nodes, question)
        if canary is not None:
            for node_id in nodes:
                if not found[node_id] and not _appears(_answer_to(canary, node_id), node_id, _VISIBLE_S):
                    found[node_id] = [f"its files in {question.written}={canary.parent} are not visible to other nodes"]
    different = [f"Node {address} (id {id_}): {'; '.join(found[id_])}." for id_, address in nodes.items() if found[id_]]
    if different:
        raise ConfigError("\n".join([*different, "Every node needs the same code and the same folders as the driver."]))
    compared.update(nodes)
    logger.info("%d other nodes have the same code and folders: %s.", len(nodes), ", ".join(nodes.values()))


def _ask(nodes: Mapping[str, str], question: _NodeQuestion) -> dict[str, list[str]]:
    """Return what each node lacks, by node id."""
    remote: Any = ray.remote(num_cpus=0, max_retries=0)(_differences)
    places = {node_id: NodeAffinitySchedulingStrategy(node_id, soft=False) for node_id in nodes}
    answers = {
        node_id: remote.options(scheduling_strategy=place).remote(question, node_id)
        for node_id, place in places.items()
    }
    _, late = ray.wait(list(answers.values()), num_returns=len(answers), timeout=_ANSWER_S)
    if late:
        silent = ", ".join(f"{nodes[id_]} (id {id_})" for id_, answer in answers.items() if answer in late)
        raise DeadlineExceededError(
            f"No answer within {_ANSWER_S:g} s from node {silent}: it does not start a worker process. Look at the "
            "raylet's log there, in session_latest/logs of Ray's folder, and at whether its Python environment can be "
            "read."
        )
    return {node_id: _answer_of(answer) for node_id, answer in answers.items()}


def _answer_of(ref: Any) -> list[str]:
    try:
        differences: list[str] = ray.get(ref)
    except RayError as error:
        return [f"it could not answer: {' '.join(str(error).split())[-400:]}"]
    return differences


def _differences(question: _NodeQuestion, node_id: str) -> list[str]:
    """Return what is missing on the node that runs this."""
    found = []
    own = _code()
    if own.partition(", in")[0] != question.code.partition(", in")[0]:
        found.append(f"it runs nemo_rl {own}, the driver {question.code}")
    for key, path in question.folders.items():
        if not Path(path).is_dir():
            found.append(f"{key}={path} is not there")
    if question.canary is None:
        return found
    folder = f"{question.written}={question.canary.parent}"
    if not _appears(question.canary, question.canary.name, question.patience_s):
        return [*found, f"{folder} is not the driver's folder (a file that the driver wrote is not there)"]
    try:
        _answer_to(question.canary, node_id).write_text(node_id)
    except OSError as error:
        found.append(f"{folder} cannot be written: {error.strerror}")
    return found


@contextmanager
def _canary(written: tuple[str, str] | None) -> Iterator[Path | None]:
    """Write a file into the folder that all ranks write into. After the block, delete it and the nodes' answers."""
    if written is None:
        yield None
        return
    folder = Path(written[1])
    folder.mkdir(parents=True, exist_ok=True)
    canary = folder / f".nodes-{uuid.uuid4().hex}"
    canary.write_text(canary.name)
    try:
        yield canary
    finally:
        for file in folder.glob(f"{canary.name}*"):
            file.unlink(missing_ok=True)


def _answer_to(canary: Path, node_id: str) -> Path:
    return canary.with_name(f"{canary.name}-{node_id}")


def _appears(file: Path, content: str, patience_s: float) -> bool:
    """Return whether another node's file becomes readable here within `patience_s`."""
    end = time.monotonic() + patience_s
    while True:
        try:
            if file.read_text() == content:
                return True
        except OSError:
            pass
        if time.monotonic() > end:
            return False
        time.sleep(0.1)


def _code() -> str:
    """Return the version of the package, and a digest of its source."""
    package = Path(nemo_rl.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(os.fsencode(file.relative_to(package)) + file.read_bytes())
    try:
        version = metadata.version("nemo-rl")
    except metadata.PackageNotFoundError:
        version = "not installed"
    return f"{version} (code {digest.hexdigest()[:10]}, in {package})"
