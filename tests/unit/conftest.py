"""Fixtures shared by several packages: one local Ray, and a small disk that can be full."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

RamDisk = Callable[[str], AbstractContextManager[Path]]


@pytest.fixture(scope="session")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start one Ray on this machine for all tests that need one; yield the folder with the link to its logs."""
    import ray

    from nemo_rl.distributed.virtual_cluster import init_ray

    joined = os.environ.pop("RAY_ADDRESS", None)
    log_dir = tmp_path_factory.mktemp("ray_logs")
    init_ray(str(log_dir), num_cpus=16)
    yield log_dir
    ray.shutdown()
    if joined is not None:
        os.environ["RAY_ADDRESS"] = joined


@pytest.fixture
def ram_disk(tmp_path: Path) -> RamDisk:
    """Mount a small disk in memory with options such as `size=1m` or `ro`; skip if mounting is not allowed."""

    @contextmanager
    def mounted(options: str) -> Iterator[Path]:
        folder = tmp_path / "ram_disk"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("mounting a disk in memory needs the rights of an administrator")
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)

    return mounted
