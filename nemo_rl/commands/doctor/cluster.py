"""Join the Ray cluster at RAY_ADDRESS if it answers, and run the checks of each of its nodes there."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl.commands.doctor.checks import Finding, NodeRequest, Status, ok
from nemo_rl.commands.doctor.nodes import NODE_CHECKS, NODES, NODES_DEADLINE_S
from nemo_rl.commands.doctor.runner import perform
from nemo_rl.commands.doctor.versions import installed_versions
from nemo_rl.config import RunConfig
from nemo_rl.distributed.cluster.address import START_ONE, unreachable
from nemo_rl.distributed.virtual_cluster import init_ray


def check_cluster(address: str) -> Finding:
    """Find the control service of a cluster and join it as a driver.

    Args:
        address: value of RAY_ADDRESS: `host:port`, `ray://host:port` or `auto`.
    """
    trouble = unreachable(address)
    if trouble is not None:
        return Finding(Status.FAILED, f"RAY_ADDRESS={address}: {trouble}", START_ONE)
    init_ray()
    nodes = _alive()
    gpus = sum(node["Resources"].get("GPU", 0) for node in nodes)
    return ok(f"RAY_ADDRESS={address}: {len(nodes)} nodes, {gpus:g} GPUs", numbers={"nodes": len(nodes), "gpus": gpus})


def check_size(config: RunConfig) -> Finding:
    """Compare the nodes of the joined cluster with `cluster.num_nodes` and `cluster.gpus_per_node`."""
    cluster = config.cluster
    wanted = cluster.gpus_per_node if cluster.uses_gpu else 0
    gpus = sorted((node["Resources"].get("GPU", 0.0) for node in _alive()), reverse=True)
    fitting = sum(count >= wanted for count in gpus)
    found = f"{fitting} of {len(gpus)} nodes have {wanted} GPUs or more"
    if fitting >= cluster.num_nodes:
        return ok(found)
    asked = f"cluster.num_nodes={cluster.num_nodes} and cluster.gpus_per_node={wanted} require {cluster.num_nodes}"
    return Finding(Status.FAILED, f"{found}, {asked}", "Start Ray on more nodes, or lower these keys.")


def check_nodes(request: NodeRequest) -> list[Finding]:
    """Run the machine checks on all nodes of the joined cluster at the same time."""
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
        return [Finding(Status.FAILED, found, "Check ray status and Ray's logs on the node.", check=NODES)]
    try:
        findings: list[Finding] = ray.get(answer)
    except ray.exceptions.RayError as error:
        advice = "The node needs the same environment as this machine, with nemo_rl, and a running Ray."
        return [Finding(Status.FAILED, str(error).strip().splitlines()[-1], advice, str(error), check=NODES)]
    return findings


def _alive() -> list[dict[str, Any]]:
    return sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeManagerAddress"])


def _on(node: dict[str, Any]) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)


def _of_node(request: NodeRequest, node: dict[str, Any]) -> NodeRequest:
    return replace(request, address=node["NodeManagerAddress"], gpus=int(node["Resources"].get("GPU", 0)))
