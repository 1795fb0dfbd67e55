"""Collect tests on whole public data sets only if a copy of them is next to the repository."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "../shared/data"
collect_ignore_glob = [] if SHARED.is_dir() else ["test_*.py"]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    return SHARED
