"""Check a configuration with the checks that the run itself makes at its start (`launch.checks`), and with two more.

Invariant: the run refuses whatever fails here, with the same message; checks write no files.
"""

from collections.abc import Sequence
from functools import partial

from nemo_rl.commands.doctor import dummy_step
from nemo_rl.commands.doctor.checks import Check, Finding, skipped
from nemo_rl.commands.doctor.runner import as_the_run_says
from nemo_rl.config import MasterConfig
from nemo_rl.launch.checks import CHECKS, Passed, Request, RunCheck
from nemo_rl.utils.addresses import cluster_address

_ADVICE = "The run's own steps would fail too; see docs/start/troubleshooting.md."


def run_checks(request: Request, *, with_step: bool = False) -> Sequence[Check[Request]]:
    """Return the checks of a configuration, cheapest first.

    Args:
        request: the run.
        with_step: whether to start the policy's workers for one step.
    """
    checks = [Check(check.name, partial(_look, check), check.deadline_s, check.needs) for check in CHECKS]
    timeouts = request.config.cluster.timeouts
    deadline_s = timeouts.setup_s + timeouts.train_s + timeouts.shutdown_s
    before_a_step = ("cluster", "devices", "model", "mesh", "memory", "ports") if with_step else ()
    step = Check("dummy step", partial(_look_at_a_step, with_step), deadline_s, before_a_step)
    return [Check("nodes for the run", check_size, needs=("cluster",)), *checks, step]


def _look(check: RunCheck, request: Request) -> Finding:
    reason = check.skipped(request.config)
    return skipped(reason) if reason else as_the_run_says(partial(check.look, request), check.advice)


def check_size(request: Request) -> Finding:
    """Compare the joined cluster's nodes with the configuration."""
    if not cluster_address():
        return skipped("the run starts its own Ray on this machine")
    from nemo_rl.commands.doctor import cluster

    return cluster.check_size(request.config)


def _look_at_a_step(is_wanted: bool, request: Request) -> Finding:
    """Start the policy's workers and run one update at the longest length."""
    config = request.config
    if not is_wanted:
        return skipped("needs --dummy-step, because it starts the workers")
    if not isinstance(config, MasterConfig):
        return skipped("an evaluation trains nothing")
    return as_the_run_says(lambda: Passed(dummy_step.make_step(config)), _ADVICE)
