"""Fixtures for all tests: signal handlers as a terminal sets them, garbage collection in forked processes, one Ray."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from nemo_rl.host.stop_signals import STOP_SIGNALS, handlers_kept

pytest_plugins = ["tiers.plugin"]

# Finalizers of Ray objects from earlier tests wait for threads that a forked process does not have.
os.register_at_fork(before=gc.disable, after_in_parent=gc.enable, after_in_child=lambda: (gc.freeze(), gc.enable()))

# An example may take long on a machine with other load.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")


def pytest_configure(config: pytest.Config) -> None:
    """Run fast tests on one thread: their tensors are small, and workers of pytest-xdist share the cores."""
    if config.getoption("markexpr") == "fast":
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    """Run one backward pass, after which no later one starts threads of autograd.

    The first backward pass of a process starts a thread for each device, and a process forked after that cannot run
    another. `FakeTensorMode` registers fake GPUs, so that a test which uses it would break the ranks of later tests.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.ones(1, requires_grad=True).sum().backward()


@pytest.fixture(autouse=True)
def own_signal_handlers() -> Iterator[None]:
    """Reset signals that `nohup` or a background job ignores, and handlers of other tests."""
    with handlers_kept():
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
        yield


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m fast`, import only modules that are marked: importing all of them takes longer than their tests."""
    if config.getoption("markexpr") != "fast":
        return None
    if collection_path.is_dir():
        return None if any(map(_is_fast, collection_path.rglob("test_*.py"))) else True
    return True if collection_path.name.startswith("test_") and not _is_fast(collection_path) else None


@cache
def _is_fast(module: Path) -> bool:
    return "pytest.mark.fast" in module.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def no_ray_in_fast_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a fast test that starts Ray in this process."""
    ran_before = _ray_runs()
    yield
    if request.node.get_closest_marker("fast") is not None and not ran_before:
        assert not _ray_runs(), "a test that is marked fast started Ray"


@pytest.fixture(scope="session")
def ray_logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the folder with the link to the logs of the local Ray, and end this Ray at the end of the session."""
    joined = os.environ.pop("RAY_ADDRESS", None)
    yield tmp_path_factory.mktemp("ray_logs")
    if _ray_runs():
        sys.modules["ray"].shutdown()
    if joined is not None:
        os.environ["RAY_ADDRESS"] = joined


@pytest.fixture(scope="module")
def local_ray(ray_logs: Path) -> Path:
    """Start one Ray on this machine for all modules that need one; return the folder with the link to its logs.

    A module starts it again if another one ended it: a driver without Ray would look for a cluster by itself and could
    join one that a test has ended, which ends the whole process.
    """
    if not _ray_runs():
        from nemo_rl.distributed.virtual_cluster import init_ray

        init_ray(str(ray_logs), num_cpus=16)
    return ray_logs


def _ray_runs() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()
