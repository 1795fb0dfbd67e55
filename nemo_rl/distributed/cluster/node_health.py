"""Check whether the machines of workers are lost, after a failure on them.

When a machine is lost, ranks that communicated with its ranks report broken connections immediately. Ray reports the
machine only when its health checks have failed (15 s; a minute if the network drops them). Therefore this module
connects to the machine's node manager directly. Invariants: each check takes a few seconds at most. The node of this
process is never reported as lost.
"""

import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import ray

from nemo_rl.distributed.cluster.local_ray import local_ray_has_died
from nemo_rl.distributed.workers.process import WorkerIdentity

_ANSWER_S = 3.0


def describe_losses(workers: Iterable[WorkerIdentity]) -> str:
    """Describe each lost node of these workers in a line (address, id, evidence and workers), or return ""."""
    by_node: dict[str, list[WorkerIdentity]] = {}
    for worker in workers:
        by_node.setdefault(worker.node_id, []).append(worker)
    lines = []
    for node_id, reason in lost_nodes(by_node.keys()).items():
        there = ", ".join(f"{worker.name} (rank {worker.rank})" for worker in by_node[node_id])
        lines.append(f"Node {by_node[node_id][0].node_ip} (id {node_id}) is lost: {reason}. It ran {there}.")
    return "\n".join(lines)


def lost_nodes(node_ids: Iterable[str]) -> dict[str, str]:
    """Return the lost nodes among these, with the evidence by node id."""
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
    """Return the evidence that a node of `ray.nodes()` is lost. Return None if its node manager accepts connections."""
    if not node["Alive"]:
        return str(node.get("DeathReasonMessage") or "Ray has marked it dead")
    address, port = str(node["NodeManagerAddress"]), int(str(node["NodeManagerPort"]))
    try:
        socket.create_connection((address, port), timeout=_ANSWER_S).close()
    except OSError as error:
        return f"its node manager (raylet, port {port}) does not answer: {error.strerror or error}"
    return None
