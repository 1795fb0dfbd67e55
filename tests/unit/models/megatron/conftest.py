"""Fixtures of the tests of the Megatron backend; helpers of the folder above can be imported here."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@pytest.fixture(scope="session")
def host() -> Iterator[Any]:
    from rank_host import Host

    started = Host()
    yield started
    started.stop()
