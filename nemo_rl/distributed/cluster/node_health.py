"""Whether the machines of workers are still there; asked when something has failed on them.

When a machine goes, the ranks that talked to its ranks report broken connections at once, and Ray reports the machine
only when its health checks have failed (15 s, a minute where the network swallows them). So its node manager is asked
directly. Invariant: no answer here takes longer than a few seconds, and the node of this process is never called lost.
"""

import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import ray

from nemo_rl.distributed.cluster.local_ray import local_ray_has_died
from nemo_rl.distributed.workers.process import WorkerIdentity

_ANSWER_S = 3.0


def describe_losses(workers: Iterable[WorkerIdentity]) -> str:
    """One line for each lost node of these workers: address, id, which of them it ran, and how it is known; or ""."""
    by_node: dict[str, list[WorkerIdentity]] = {}
    for worker in workers:
        by_node.setdefault(worker.node_id, []).append(worker)
    lines = []
    for node_id, reason in lost_nodes(by_node.keys()).items():
        there = ", ".join(f"{worker.name} (rank {worker.rank})" for worker in by_node[node_id])
        lines.append(f"Node {by_node[node_id][0].node_ip} (id {node_id}) is lost: {reason}. It ran {there}.")
    return "\n".join(lines)


def lost_nodes(node_ids: Iterable[str]) -> dict[str, str]:
    """The nodes among these that are gone, by id, with how that is known."""
    if local_ray_has_died() or not ray.is_initialized():
        return {}
    others = set(node_ids) - {ray.get_runtime_context().get_node_id()}
    if not others:
        return {}
    asked = [node for node in ray.nodes() if node["NodeID"] in others]
    with ThreadPoolExecutor(max_workers=len(others)) as pool:
        reasons = pool.map(_why_lost, asked)
    return {node["NodeID"]: reason for node, reason in zip(asked, reasons, strict=True) if reason is not None}


def _why_lost(node: dict[str, object]) -> str | None:
    """How a node of `ray.nodes()` is known to be lost; None where its node manager takes connections."""
    if not node["Alive"]:
        return str(node.get("DeathReasonMessage") or "Ray has marked it dead")
    address, port = str(node["NodeManagerAddress"]), int(str(node["NodeManagerPort"]))
    try:
        socket.create_connection((address, port), timeout=_ANSWER_S).close()
    except OSError as error:
        return f"its node manager (raylet, port {port}) does not answer: {error.strerror or error}"
    return None
