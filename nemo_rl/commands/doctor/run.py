"""Check a configuration with the checks of a run's start (`launch.checks`), and with two more.

Invariant: a run refuses everything that fails here, with the same message. Checks write no files.
"""

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from nemo_rl.commands.doctor.checks import Check, Finding, skipped
from nemo_rl.commands.doctor.runner import as_the_run_says
from nemo_rl.config import MasterConfig, PolicyConfig
from nemo_rl.config.runs.service import ServiceMasterConfig
from nemo_rl.launch.checks import CHECKS, Passed, Request, RunCheck
from nemo_rl.utils.addresses import cluster_address
from nemo_rl.utils.errors import NemoRLError


def make_step(config: MasterConfig) -> str:
    """Start the policy, run one update, and end the policy.

    Returns:
        Text with loss, gradient norm and seconds.

    Raises:
        NemoRLError: the workers did not start or died, or the loss is not finite.
    """
    import torch

    from nemo_rl.algorithms.setup.open_policy import OpenPolicy
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.losses.preference import PreferenceLossFn
    from nemo_rl.losses.supervised import NLLLossFn

    policy_config, started = config.policy, time.perf_counter()
    with OpenPolicy(config.policy, config.cluster) as policy:
        ready = time.perf_counter()
        rows = policy.data_parallel_size * rows_of_microbatch(policy_config)
        shape = (rows, policy_config.max_total_sequence_length)
        batch: BatchedDataDict[Any] = BatchedDataDict(
            input_ids=torch.randint(0, len(policy.tokenizer), shape),
            input_lengths=torch.full((rows,), shape[1]),
            token_mask=torch.ones(shape),
            sample_mask=torch.ones(rows),
        )
        scores = policy_config.reward_model_cfg.enabled
        result: Any = policy.train(batch, PreferenceLossFn() if scores else NLLLossFn(), gbs=rows)
        loss, norm = float(result["loss"]), float(result["grad_norm"])
    if not math.isfinite(loss) or not math.isfinite(norm):
        raise NemoRLError(f"the loss of a step on random tokens is {loss}, the norm of its gradient {norm}.")
    done = time.perf_counter()
    return (
        f"{rows} rows of {shape[1]} tokens: loss {loss:.3g}, gradient norm {norm:.3g}; workers ready in "
        f"{ready - started:.1f} s, step in {done - ready:.1f} s"
    )


def rows_of_microbatch(policy: PolicyConfig) -> int:
    """Return the rows of maximum length in a rank's microbatch, or in two if that is odd, to keep pairs together."""
    from nemo_rl.models.capacity.memory import microbatch_tokens

    rows = max(microbatch_tokens(policy, trains=True) // policy.max_total_sequence_length, 1)
    return rows * (1 + rows % 2)


_ADVICE = "The run's own steps would fail too; see docs/start/troubleshooting.md."


def run_checks(request: Request, *, with_step: bool = False) -> Sequence[Check[Request]]:
    """Return the checks of a configuration, cheapest first.

    Args:
        with_step: whether to start the policy's workers for one step.
    """
    first = Check("nodes for the run", check_size, needs=("cluster",))
    if isinstance(request.config, ServiceMasterConfig):
        from nemo_rl.commands.service_checks import SERVICE_CHECKS  # it loads torch

        return [first, *map(_check_of, SERVICE_CHECKS)]
    timeouts = request.config.cluster.timeouts
    deadline_s = timeouts.setup_s + timeouts.train_s + timeouts.shutdown_s
    before_a_step = ("cluster", "devices", "model", "mesh", "memory", "ports") if with_step else ()
    step = Check("dummy step", partial(_look_at_a_step, with_step), deadline_s, before_a_step)
    return [first, *map(_check_of, CHECKS), step]


def _check_of(check: RunCheck) -> Check[Request]:
    return Check(check.name, partial(_look, check), check.deadline_s, check.needs)


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
    return as_the_run_says(lambda: Passed(make_step(config)), _ADVICE)
