"""Fixtures of the fault tests: a run with a fault, and the metrics of the undisturbed run."""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "functional"))

from example_runs import ExampleRuns, Metrics
from fault_runs import FaultRuns


@pytest.fixture
def fault_runs(tmp_path: Path) -> Iterator[FaultRuns]:
    """Runs below the test's folder; all are ended after the test."""
    runs = ExampleRuns(tmp_path)
    yield FaultRuns(runs, tmp_path)
    runs.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Metrics]:
    """Return the metrics of a run without a fault, by mode; made once."""

    @cache
    def metrics_of(mode: str) -> Metrics:
        folder = tmp_path_factory.mktemp(f"undisturbed-{mode}")
        runs = ExampleRuns(folder)
        try:
            return FaultRuns(runs, folder).finish_without_fault(mode)
        finally:
            runs.close()

    return metrics_of
