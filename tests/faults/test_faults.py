"""Kill or stop each process of a run in each phase of a step: the run keeps the promise of the matrix.

pytest tests/faults                the cells of `matrix.IN_CI`
pytest tests/faults -m long        all other cells
pytest tests/faults -m long -k 'engine and saving'
"""

import json
import re
import time
from collections.abc import Callable

import psutil
import pytest
from example_runs import ExampleRun, Metrics, of_training
from fault_runs import FAULT_STEP, FaultRuns, logged_once
from matrix import CELLS, IN_CI, Cell, Promise

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

_ENDS_WITHIN_S = 60.0


def parameters() -> list[object]:
    """All cells; those that CI leaves out are long."""
    return [pytest.param(cell, id=str(cell), marks=[] if cell in IN_CI else pytest.mark.long) for cell in CELLS]


@pytest.mark.parametrize("cell", parameters())
def test_a_run_keeps_its_promise(cell: Cell, fault_runs: FaultRuns, undisturbed: Callable[[str], Metrics]) -> None:
    expected = undisturbed(cell.mode)
    run = fault_runs.start(cell, cell.mode)
    while run.process.poll() is None and not fault_runs.report.exists():
        run.processes()
        time.sleep(0.2)
    assert fault_runs.report.exists(), run.log()[-3000:]
    victim = json.loads(fault_runs.report.read_text())["pid"]
    if cell.row.promise is Promise.ENDS:
        check_that_it_ends(cell, run, fault_runs, expected)
    else:
        check_that_it_continues(cell, run, victim, expected)
    assert run.survivors() == []


def check_that_it_continues(cell: Cell, run: ExampleRun, victim: int, expected: Metrics) -> None:
    seconds = time.monotonic()
    while run.process.poll() is None and time.monotonic() - seconds < 300:
        run.processes()
        time.sleep(0.2)
    assert run.finish(1) == 0, run.log()[-4000:]
    assert re.search(cell.row.evidence, run.log()), run.log()[-4000:]
    check_equal(cell, of_training(logged_once(run.log_dir)), expected)
    if cell.victim != "driver":
        assert not psutil.pid_exists(victim), f"the {cell.victim} was never replaced"


def check_that_it_ends(cell: Cell, run: ExampleRun, fault_runs: FaultRuns, expected: Metrics) -> None:
    status = run.finish(_ENDS_WITHIN_S)
    assert status != 0
    if cell.victim != "driver":
        assert status == 1, run.log()[-3000:]
    assert re.search(cell.row.evidence, run.log()), run.log()[-3000:]
    assert run.survivors() == []
    before = of_training(logged_once(run.log_dir))
    resumed = fault_runs.start(None, cell.mode, logs="resumed")
    assert resumed.finish() == 0, resumed.log()[-3000:]
    after = of_training(logged_once(resumed.log_dir))
    check_equal(cell, before | after, expected)
    check_equal(cell, after | before, expected)


def check_equal(cell: Cell, metrics: Metrics, expected: Metrics) -> None:
    """Compare bit for bit.

    If an engine is lost while it samples ahead, its requests are sampled again, perhaps from newer weights.
    """
    if cell.victim == "engine" and "ahead" in cell.mode:
        assert metrics.keys() == expected.keys()
        assert all(value == expected[key] for key, value in metrics.items() if key[1] < FAULT_STEP)
    else:
        assert metrics == expected
