"""Fixtures of the tests of the Megatron backend."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def host() -> Iterator[Any]:
    from rank_host import Host

    started = Host()
    yield started
    started.stop()
