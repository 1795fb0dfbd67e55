"""Choose the sizes of a run on this machine's CPUs by real steps: ranks, threads, engines, microbatches.

The kinds of sizes are tried one after the other. An alternative is timed once, together with the earlier alternatives
that were clearly faster than the configuration's own sizes. In the end the best combination, or else the fastest
alternative, is timed in turns with the own sizes. Invariant: other sizes are proposed only if they were clearly faster
in these turns too; otherwise the own sizes are proposed.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from nemo_rl.algorithms.setup.memory_forecast import rows_per_sample
from nemo_rl.config import MasterConfig, load_config
from nemo_rl.config.base.paths import find_path
from nemo_rl.config.loading.algorithms import ALGORITHMS, algorithm_of
from nemo_rl.host.capacity import usable_cores
from nemo_rl.host.stop_signals import leave_by_unwinding
from nemo_rl.models.capacity.memory import microbatch_tokens
from nemo_rl.sizing import report
from nemo_rl.sizing.trial import Steps, take_steps
from nemo_rl.utils.errors import ConfigError, NemoRLError

TURNS = 2
"""Trials of the best sizes and of the own sizes at the end, in turns."""
CLEAR = 0.05
"""Share of the step's seconds by which sizes must be faster to count as clearly faster."""
TRIAL_DEADLINE_S = 600.0
_ENGINES = "policy.generation.colocated"


@dataclass(frozen=True)
class Alternative:
    """Another value of one kind of size."""

    what: str
    """Name of the kind, with the value."""
    overrides: Sequence[str]
    """Overrides that set the value."""


def measure_run(arguments: argparse.Namespace, config: MasterConfig) -> int:
    """Measure, print the proposal and write it; return the exit status.

    Raises:
        ConfigError: the run is not for CPUs.
        NemoRLError: the configuration's own sizes do not run.
    """
    if config.cluster.uses_gpu:
        raise ConfigError("--measure takes steps on this machine's CPUs, and cluster.device=cuda. Leave it out.")
    algorithm = arguments.algorithm or algorithm_of(arguments.config)
    file = Path(str(find_path(arguments.config)))

    leave_by_unwinding()

    def timed(overrides: Sequence[str]) -> Steps:
        return take_steps(algorithm, file, [*arguments.overrides, *overrides], arguments.steps, TRIAL_DEADLINE_S)

    def accepted(overrides: Sequence[str]) -> bool:
        try:
            load_config(file, [*arguments.overrides, *overrides], schema=ALGORITHMS[algorithm])
        except ConfigError:
            return False
        return True

    sys.stdout.write("Trials, seconds of a step (median) and processor seconds of a step\n")
    best = search(alternatives(config), timed, accepted, _tell)
    best = compare(best, timed, _tell)
    given = [*arguments.overrides, *best]
    lines = ["", *report.command_lines(arguments.config, given)]
    if not best:
        lines.append("The configuration's own sizes were the fastest: nothing to change.")
    sys.stdout.write("\n".join([*lines, ""]))
    if arguments.write is not None:
        report.write_file(arguments.write, file, given, {}, ALGORITHMS[algorithm])
        sys.stdout.write(f"wrote {arguments.write}\n")
    return 0


def alternatives(config: MasterConfig) -> Iterator[list[Alternative]]:
    """Yield the alternatives of each kind of size, in the order in which the kinds are tried."""
    cores, ranks = usable_cores(), config.cluster.policy_ranks_per_node
    generation = config.policy.generation
    if cores > 1:
        numbers = sorted({1, min(2 * ranks, cores), cores} - {ranks})
        yield [Alternative(f"{n} ranks", [f"cluster.ranks_per_node={n}"]) for n in numbers]
    if generation is not None and generation.colocated.enabled and cores > 1:
        keys = [f"{_ENGINES}.enabled=false", f"{_ENGINES}.resources.ranks_per_node={cores}"]
        yield [Alternative(f"{cores} engines of their own", keys)]
    rows = rows_per_sample(config)
    tokens = microbatch_tokens(config.policy, trains=True, rows_per_sample=rows)
    length = config.policy.max_total_sequence_length * rows
    yield [each for factor in (2, 4) if tokens // factor >= length for each in _microbatch(config, factor)]
    if cores > 1:
        now = config.cluster.threads_per_rank or max(cores // ranks, 1)
        threads = sorted({1, cores} - {now})
        yield [Alternative(f"{n} threads for a rank", [f"cluster.threads_per_rank={n}"]) for n in threads]


def _microbatch(config: MasterConfig, factor: int) -> Iterator[Alternative]:
    policy = config.policy
    for name in ("sequence_packing", "dynamic_batching"):
        way: Any = getattr(policy, name)
        if way.enabled:
            sizes = [f"policy.{name}.{key}={getattr(way, key) // factor}" for key in _TOKENS]
            yield Alternative(f"microbatches / {factor}", sizes)
            return
    if policy.train_micro_batch_size % factor == 0:
        rows = policy.train_micro_batch_size // factor
        yield Alternative(f"microbatches / {factor}", [f"policy.train_micro_batch_size={rows}"])


_TOKENS = ("train_mb_tokens", "logprob_mb_tokens")


def search(
    kinds: Iterator[list[Alternative]],
    timed: Callable[[Sequence[str]], Steps],
    accepted: Callable[[Sequence[str]], bool],
    tell: Callable[[str, Steps | NemoRLError], None],
) -> list[str]:
    """Try one kind of size after the other, and keep an alternative that is clearly faster than the sizes before.

    Args:
        kinds: alternatives by kind.
        timed: takes steps with overrides.
        accepted: whether the configuration accepts overrides; others are left out.
        tell: called with each result; an alternative that fails is left out.

    Returns:
        The overrides of the best sizes; those of the fastest alternative if nothing was clearly faster than the own
        sizes.
    """
    best: list[str] = []
    all_results: list[tuple[float, list[str]]] = []
    before = timed(best)
    tell("own sizes", before)
    for kind in kinds:
        results = []
        for alternative in kind:
            overrides = [*best, *alternative.overrides]
            if not accepted(overrides):
                continue
            try:
                steps = timed(overrides)
            except NemoRLError as error:
                tell(alternative.what, error)
                continue
            tell(alternative.what, steps)
            results.append((steps.typical, overrides, steps))
        fastest = min(results, key=lambda each: each[0], default=None)
        if fastest is not None and fastest[0] < (1 - CLEAR) * before.typical:
            _, best, before = fastest
        all_results += [(seconds, overrides) for seconds, overrides, _ in results]
    return best or min(all_results, default=(0.0, best))[1]


def compare(
    best: list[str], timed: Callable[[Sequence[str]], Steps], tell: Callable[[str, Steps | NemoRLError], None]
) -> list[str]:
    """Time sizes and the own ones in turns; return their overrides if they were clearly faster, else none."""
    if not best:
        return []
    found: dict[str, list[float]] = {"own sizes, again": [], "fastest other, again": []}
    for _ in range(TURNS):
        for (name, seconds), overrides in zip(found.items(), ([], best), strict=True):
            try:
                steps = timed(overrides)
            except NemoRLError as error:
                if not overrides:
                    raise
                tell(name, error)
                return []
            tell(name, steps)
            seconds += steps.wall
    own, other = map(median, found.values())
    return best if other < (1 - CLEAR) * own else []


def _tell(name: str, result: Steps | NemoRLError) -> None:
    if isinstance(result, Steps):
        text = f"{result.typical:>8.2f} s{result.processor:>10.2f} s"
    else:
        lines = str(result).strip().splitlines()
        text = "failed: " + " ".join(dict.fromkeys((lines[0], lines[-1].strip())))
    sys.stdout.write(f"  {name:<28}{text}\n")
    sys.stdout.flush()
