"""Finds the Ray cluster that RAY_ADDRESS names, within a deadline, and performs the checks of each of its nodes there.

Invariant: Ray is asked to join only a cluster that has answered; its own wait for one that does not is minutes long.
"""

import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray._private import services
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl.config import EvalMasterConfig, MasterConfig
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.doctor.findings import Finding, Status, ok
from nemo_rl.doctor.nodes import NODE_CHECKS, NODES, NODES_DEADLINE_S
from nemo_rl.doctor.requests import NodeRequest
from nemo_rl.doctor.runner import perform
from nemo_rl.doctor.versions import installed_versions

_CONNECT_S = 5.0
_HEALTH_S = 20.0
_START_ONE = (
    "Start it (ray start --head there, ray start --address=... on the other nodes), correct RAY_ADDRESS, or unset it "
    "to run on this machine alone."
)


def check_cluster(address: str) -> Finding:
    """Find the control service of a cluster and join it as a driver.

    Args:
        address: value of RAY_ADDRESS: `host:port`, `ray://host:port` or `auto`.
    """
    trouble = _unreachable(address)
    if trouble is not None:
        return Finding(Status.FAILED, f"RAY_ADDRESS={address}: {trouble}", _START_ONE)
    init_ray()
    nodes = _alive()
    gpus = sum(node["Resources"].get("GPU", 0) for node in nodes)
    return ok(f"RAY_ADDRESS={address}: {len(nodes)} nodes, {gpus:g} GPUs", numbers={"nodes": len(nodes), "gpus": gpus})


def _unreachable(address: str) -> str | None:
    """What keeps a cluster from being joined; None if nothing does."""
    try:
        target = services.canonicalize_bootstrap_address(address.removeprefix("ray://"))
        if target is None:
            return "no cluster runs on this machine"
        host, _, port = target.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, ValueError, ConnectionError) as error:
        return f"nobody answers ({error})"
    if address.startswith("ray://"):
        return None
    # In a process of its own: what waits in Ray's C++ code cannot be interrupted here.
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", target]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_HEALTH_S, check=False)
    except subprocess.TimeoutExpired:
        return f"what listens there is no Ray that answers within {_HEALTH_S:g} s"
    said = asked.stderr.strip().splitlines()
    return None if asked.returncode == 0 else f"what listens there is no Ray to join ({said[-1] if said else 'silent'})"


def check_size(config: MasterConfig | EvalMasterConfig) -> Finding:
    """Hold the nodes of the joined cluster against `cluster.num_nodes` and `cluster.gpus_per_node`."""
    cluster = config.cluster
    wanted = cluster.gpus_per_node if cluster.uses_gpu else 0
    gpus = sorted((node["Resources"].get("GPU", 0.0) for node in _alive()), reverse=True)
    fitting = sum(count >= wanted for count in gpus)
    found = f"{fitting} of {len(gpus)} nodes have {wanted} GPUs or more"
    if fitting >= cluster.num_nodes:
        return ok(found)
    asked = f"cluster.num_nodes={cluster.num_nodes} and cluster.gpus_per_node={wanted} ask for {cluster.num_nodes}"
    return Finding(Status.FAILED, f"{found}, {asked}", "Start Ray on more nodes, or lower these keys.")


def check_nodes(request: NodeRequest) -> list[Finding]:
    """Perform the checks of a machine on each node of the joined cluster, on all of them at once."""
    request = replace(request, starts_ray=False, versions=installed_versions())
    look = ray.remote(num_cpus=0, max_retries=0)(_look)
    nodes = _alive()
    answers = [look.options(scheduling_strategy=_on(node)).remote(_of_node(request, node)) for node in nodes]
    done, _ = ray.wait(answers, num_returns=len(answers), timeout=NODES_DEADLINE_S)
    return [
        replace(finding, node=node["NodeManagerAddress"])
        for node, answer in zip(nodes, answers, strict=True)
        for finding in _findings(answer, answer in done)
    ]


def _look(request: NodeRequest) -> list[Finding]:
    return perform(NODE_CHECKS, request)


def _findings(answer: ray.ObjectRef, is_there: bool) -> Sequence[Finding]:
    if not is_there:
        found = f"the node did not answer in {NODES_DEADLINE_S:g} s"
        return [Finding(Status.FAILED, found, "Look at ray status and at the node's /tmp/ray.", check=NODES)]
    try:
        findings: list[Finding] = ray.get(answer)
    except ray.exceptions.RayError as error:
        advice = "The node needs the same environment as this machine, with nemo_rl in it, and Ray must be alive there."
        return [Finding(Status.FAILED, str(error).strip().splitlines()[-1], advice, str(error), check=NODES)]
    return findings


def _alive() -> list[dict[str, Any]]:
    return sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeManagerAddress"])


def _on(node: dict[str, Any]) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)


def _of_node(request: NodeRequest, node: dict[str, Any]) -> NodeRequest:
    return replace(request, address=node["NodeManagerAddress"], gpus=int(node["Resources"].get("GPU", 0)))
