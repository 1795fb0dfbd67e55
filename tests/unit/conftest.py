"""A fixture shared by several packages: a small disk that can be full."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

RamDisk = Callable[[str], AbstractContextManager[Path]]


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
