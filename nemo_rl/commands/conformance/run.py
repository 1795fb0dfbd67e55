"""Run the suite on an engine of the caller, or on one that is built in its own process, and make a table.

Invariant: no check hangs, because each property has a deadline, and so has the process.
"""

import asyncio
import multiprocessing
import os
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from nemo_rl.commands.conformance.case import Case, ContractError, NotOffered, load
from nemo_rl.commands.conformance.properties import (
    aborts,
    bad_words,
    batch_invariance,
    death,
    filters,
    greedy,
    interrupted_update,
    layer_outputs,
    limits,
    logprobs,
    missing_tensor,
    same_version,
    samples,
    seeds,
    sleep,
    so_far,
    stops,
    update,
    update_in_flight,
)
from nemo_rl.files.trusted_code import accept_code, trusted_code
from nemo_rl.host.boundary import Boundary, raised_as
from nemo_rl.host.row_invariance import compute_rows_alike
from nemo_rl.models.generation.interfaces import Engine, EngineSettings
from nemo_rl.models.generation.registry import engine_kind, make_engine

type Property = Callable[[Engine, Case], Awaitable[None]]

PROPERTIES: Mapping[str, Property] = {
    check.__name__: check
    for check in (
        greedy,
        logprobs,
        filters,
        samples,
        seeds,
        bad_words,
        stops,
        limits,
        aborts,
        so_far,
        update,
        update_in_flight,
        same_version,
        interrupted_update,
        missing_tensor,
        layer_outputs,
        sleep,
        death,
    )
}
"""Properties of every engine by name. `death` breaks the engine, so it is the last one."""

DECLARED: Mapping[str, Property] = {batch_invariance.__name__: batch_invariance}
"""Properties that an engine may declare, by name. They are checked if it does."""

ALL = {**DECLARED, **PROPERTIES}
"""All properties, in the order in which they are checked."""

_START_S = 300.0
_END_S = 20.0


@dataclass
class Report:
    """Findings about an engine."""

    backend: str
    """Name of the engine."""
    failures: dict[str, str] = field(default_factory=dict)
    """Description of what is wrong with the engine, by property."""
    not_promised: dict[str, str] = field(default_factory=dict)
    """Reason why the engine does not offer a property, by property."""
    holding: list[str] = field(default_factory=list)
    """Names of the properties that hold."""
    largest: float = 0.0
    """Largest difference of a log-probability from the reference."""
    distances: list[tuple[float, float]] = field(default_factory=list)
    """As in the case."""

    def outcome(self, name: str) -> str:
        """Return the text of the table for a property."""
        if name in self.failures:
            return "FAILS"
        return "yes" if name in self.holding else "-"


async def check_property(engine: Engine, case: Case, name: str) -> None:
    """Check one property of an engine that serves the model of a case.

    Args:
        engine: the engine, which has the weights of the case's folder before and after the check.
        case: the model and the tolerance.
        name: a key of `ALL`.

    Raises:
        ContractError: the engine breaks the property, raises another error, or needs more than `case.deadline_s`.
        NotOffered: the property is optional and the engine lacks it, or the case exempts it.
    """
    if name in case.exempt:
        raise NotOffered(case.exempt[name])

    def broken(error: Exception) -> ContractError:
        return ContractError(f"{name}: the engine raised {type(error).__name__}: {error}")

    try:
        with raised_as(broken, but=(ContractError, NotOffered, TimeoutError)):  # an engine may raise anything
            async with asyncio.timeout(case.deadline_s):
                await ALL[name](engine, case)
    except TimeoutError:
        raise ContractError(f"{name}: no end within {case.deadline_s:g} s") from None


async def check_all(engine: Engine, case: Case, report: Report, names: Iterable[str] = ALL) -> Report:
    """Check properties one after the other, and note the outcomes in a report, which is returned.

    After a failure the engine gets the weights of the case's folder again.
    """
    for name in names:
        try:
            await check_property(engine, case, name)
            report.holding.append(name)
        except NotOffered as reason:
            report.not_promised[name] = str(reason)
        except ContractError as violation:
            report.failures[name] = str(violation)
            await load(engine, case.model(), 0)
    report.largest = max([report.largest, *case.measured])
    report.distances = list(case.distances)
    return report


def check_engine(settings: EngineSettings, case: Case, names: Sequence[str] = tuple(ALL)) -> Report:
    """Build an engine in a process of its own, with the environment that it needs, and check it.

    Args:
        settings: settings of the engine, which loads the weights of `case.folder` (`load_weights`).
        case: the model and the tolerance.
        names: properties to check, keys of `ALL`.

    Returns:
        What holds, what fails and what the engine does not promise. An engine that cannot be built, that ends the
        process or that blocks it fails all properties that have no outcome yet.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, settings, case, names, trusted_code()), daemon=True)
    own = engine_kind(settings.backend).environment(settings.device) | settings.env_vars | {"RANK": "0"}
    before = dict(os.environ)
    os.environ.update(own)  # the new process may read these variables while it imports
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    theirs.close()
    try:
        return _gathered(ours, Report(settings.backend), names, case.deadline_s)
    finally:
        process.join(_END_S)
        process.kill()


def _gathered(pipe: Connection, report: Report, names: Sequence[str], deadline_s: float) -> Report:
    """Collect the outcomes that the process sends, one for each property."""
    limit_s, problem = _START_S, ""
    for name in names:
        try:
            if not problem and not pipe.poll(limit_s):
                problem = f"its process gave no answer in {limit_s:g} s"
            found: Any = None if problem else pipe.recv()
        except EOFError:
            problem = "its process ended"
        if not problem and isinstance(found, str):
            problem = found
        if problem:
            report.failures[name] = problem
            continue
        report.failures |= found.failures
        report.not_promised |= found.not_promised
        report.holding += found.holding
        report.largest, report.distances = max(report.largest, found.largest), found.distances
        limit_s = 2 * deadline_s + _END_S
    return report


def _serve(pipe: Connection, settings: EngineSettings, case: Case, names: Sequence[str], code: frozenset[str]) -> None:
    accept_code(code)

    async def serve() -> None:
        if settings.zero_mismatch:
            compute_rows_alike()
        engine = make_engine(settings)
        for name in names:
            pipe.send(await check_all(engine, case, Report(settings.backend), [name]))

    with Boundary(Exception) as caught:  # the report names any error of the engine
        asyncio.run(serve())
    if caught:
        pipe.send("".join(traceback.format_exception(caught.take())))


def table(reports: Sequence[Report]) -> str:
    """Return a Markdown table of properties and engines, with the reasons of all failures below it."""
    lines = ["| property | " + " | ".join(report.backend for report in reports) + " |"]
    lines.append("|---|" + "---|" * len(reports))
    for name in ALL:
        lines.append(f"| `{name}` | " + " | ".join(report.outcome(name) for report in reports) + " |")
    lines.append("")
    for report in reports:
        reasons = report.failures | report.not_promised
        lines += [f"- {report.backend}, `{name}`: {reasons[name].strip()}" for name in ALL if name in reasons]
    return "\n".join(lines) + "\n"
