"""The endpoint that programs of the tests call."""

from collections.abc import Iterator

import pytest
from fake_endpoint import FakeEndpoint


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    endpoint = FakeEndpoint()
    yield endpoint
    endpoint.close()
