"""List the checks of one machine; they run here or, in one Ray task per node, on a cluster."""

from nemo_rl.commands.doctor.checks import Check, Finding
from nemo_rl.commands.doctor.exchange import DEADLINE_S, check_exchange
from nemo_rl.commands.doctor.gpus import check_gpus
from nemo_rl.commands.doctor.host import (
    check_host_memory,
    check_open_files,
    check_ports,
    check_ray_start,
    check_sandbox,
    check_shared_memory,
    check_temporary_files,
)
from nemo_rl.commands.doctor.processor import check_processor
from nemo_rl.commands.doctor.requests import NodeRequest
from nemo_rl.commands.doctor.versions import check_versions
from nemo_rl.config import count_gpus


def _exchange(request: NodeRequest) -> Finding:
    return check_exchange(request, count_gpus())


NODE_CHECKS: list[Check[NodeRequest]] = [
    Check("versions", check_versions),
    Check("gpus", check_gpus),
    Check("processor", check_processor),
    Check("host memory", check_host_memory),
    Check("shared memory", check_shared_memory),
    Check("open files", check_open_files),
    Check("temporary files", check_temporary_files),
    Check("sandbox", check_sandbox),
    Check("ray start", check_ray_start),
    Check("ports", check_ports),
    Check("exchange", _exchange, DEADLINE_S, needs=("ray start",)),
]

NODES = "nodes"
"""Name of the finding for a node that does not answer."""
_START_S = 60.0
NODES_DEADLINE_S = _START_S + sum(check.deadline_s for check in NODE_CHECKS)
"""Seconds until a node's task must have started and finished all checks."""
