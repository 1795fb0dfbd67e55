"""Run all checks in order: configuration, cluster, machines, run."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from nemo_rl.commands.doctor.checks import Check, Finding, NodeRequest, Status, node_request, ok
from nemo_rl.commands.doctor.nodes import NODE_CHECKS, NODES, NODES_DEADLINE_S
from nemo_rl.commands.doctor.run import run_checks
from nemo_rl.commands.doctor.runner import as_the_run_says, perform, smallest
from nemo_rl.config import RunConfig, load_config, report_findings
from nemo_rl.config.loading.algorithms import PROGRAMS, algorithm_of
from nemo_rl.config.rules.models import trust_models
from nemo_rl.host.terminal import is_terminal
from nemo_rl.launch.checks import Passed, Request
from nemo_rl.utils.addresses import cluster_address

CONFIGURATION, CLUSTER = "configuration", "cluster"
_CLUSTER_DEADLINE_S = 120.0
_GRACE_S = 30.0


def examine(arguments: argparse.Namespace) -> list[Finding]:
    """Run all checks that a command line requests."""
    address = cluster_address()
    with _progress() as tell:
        config, findings = _configuration(arguments)
        joined = False
        if address:
            findings += perform([Check(CLUSTER, _join, _CLUSTER_DEADLINE_S)], address, tell=tell)
            joined = findings[-1].status is Status.OK
        request = node_request(config, starts_ray=not address)
        machines = _on_all_nodes(request, tell) if joined else perform(NODE_CHECKS, request, tell=tell)
        findings += machines
        if config is not None:
            measured = machines if joined or not address else ()
            run = Request(config, smallest(measured, "gpu_bytes"), smallest(measured, "host_bytes"))
            findings += perform(run_checks(run, with_step=arguments.dummy_step), run, findings, tell)
    return findings


def _configuration(arguments: argparse.Namespace) -> tuple[RunConfig | None, list[Finding]]:
    """Load the configuration and check it.

    The configuration is None if none is given or keys are wrong. Files that it names may be missing.
    """
    file: Path | None = arguments.config
    if file is None:
        return None, []
    accepted: list[RunConfig] = []

    def look() -> Passed:
        algorithm = arguments.algorithm or algorithm_of(file, PROGRAMS)
        config = load_config(file, arguments.overrides, schema=PROGRAMS[algorithm], check=False)
        report_findings(config.findings())
        accepted.append(config)
        report_findings(config.missing_files())
        trust_models(config.model_keys())
        return Passed(f"{file}, read as one of {algorithm}")

    check: Check[None] = Check(CONFIGURATION, lambda _: as_the_run_says(look, "Correct the file or the override."))
    findings = perform([check], None)
    return (accepted[0] if accepted else None), findings


def _join(address: str) -> Finding:
    # This import loads Ray, which is not needed if only this machine is checked.
    from nemo_rl.commands.doctor.cluster import check_cluster

    return check_cluster(address)


def _on_all_nodes(request: NodeRequest, tell: Callable[[str], object]) -> list[Finding]:
    """Return a finding about asking the nodes of the joined cluster, then the findings of each node."""
    of_nodes: list[Finding] = []

    def look(asked: NodeRequest) -> Finding:
        from nemo_rl.commands.doctor.cluster import check_nodes

        of_nodes.extend(check_nodes(asked))
        return ok(f"asked: {', '.join(dict.fromkeys(finding.node for finding in of_nodes))}")

    return [*perform([Check(NODES, look, NODES_DEADLINE_S + _GRACE_S)], request, tell=tell), *of_nodes]


@contextmanager
def _progress() -> Iterator[Callable[[str], object]]:
    """Show on a terminal which check is running."""
    console = Console(stderr=True)
    if not is_terminal(sys.stderr):
        yield lambda name: None
        return
    with console.status("") as status:
        yield lambda name: status.update(f"checking: {name}")
