"""Problems that keep Ray from starting on this machine are found before Ray is called."""

import errno
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.distributed.cluster import local_ray
from nemo_rl.distributed.cluster.start_checks import own_ray_folder, ray_folder, require_startable_ray, start_fault
from nemo_rl.utils.errors import ConfigError, ResourceInsufficientError


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_TMPDIR", "TMPDIR", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)


def test_the_checks_pass_on_this_machine() -> None:
    assert start_fault() is None
    require_startable_ray()


def test_the_checked_folder_is_the_one_that_ray_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._common.utils import get_default_ray_temp_dir

    for changes in ({}, {"TMPDIR": "/var/tmp"}, {"RAY_TMPDIR": "/opt", "TMPDIR": "/var/tmp"}):
        for name, value in changes.items():
            monkeypatch.setenv(name, value)
        folder = ray_folder()
        with monkeypatch.context() as inside:
            inside.setenv("RAY_TMPDIR", str(folder.parent))
            assert str(folder) == get_default_ray_temp_dir()
            assert ray_folder() == folder, "a run within a run has the same folder"


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_a_path_too_long_for_sockets_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "/tmp/" + "x" * 60)
    with pytest.raises(ConfigError, match=rf"{variable} makes the paths of its sockets \d+ bytes too long: /tmp/xxx"):
        require_startable_ray()


def test_a_folder_that_cannot_be_written_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/proc")
    with pytest.raises(ConfigError, match=r"its folder /proc/ray-\d+/ray cannot be written .*Set RAY_TMPDIR"):
        require_startable_ray()


def test_the_folder_of_ray_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # short enough for sockets
        monkeypatch.setenv("RAY_TMPDIR", folder)
        _check_private_folder()


def _check_private_folder() -> None:
    parent = own_ray_folder().parent
    assert stat.S_IMODE(parent.stat().st_mode) == 0o700
    parent.chmod(0o755)
    assert stat.S_IMODE(own_ray_folder().parent.stat().st_mode) == 0o700
    parent.chmod(0o777)
    with pytest.raises(ConfigError, match=r"may be written to by others.* Set RAY_TMPDIR to a folder that only this"):
        require_startable_ray()


def test_a_machine_without_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> socket.socket:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(ConfigError, match=r"does not reach itself under 127\.0\.0\.1 .*ip link set lo up"):
        require_startable_ray()


def test_a_secret_is_made_only_if_ray_cannot_store_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_ray._token_without_home() == {}
    monkeypatch.setenv("HOME", "/proc")
    assert len(local_ray._token_without_home()["RAY_AUTH_TOKEN"]) == 64
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert local_ray._token_without_home() == {}


@pytest.mark.parametrize(
    ("failure", "attempts"),
    [(OSError(errno.EROFS, "Read-only file system"), 1), (Exception("too slow"), 3), (ConnectionError("refused"), 3)],
)
def test_a_permanent_error_is_not_retried(failure: Exception, attempts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def start(**arguments: Any) -> None:
        calls.append(arguments)
        raise failure

    monkeypatch.setenv("RAY_TMPDIR", "/opt/elsewhere")
    monkeypatch.setattr("ray.init", start)
    with pytest.raises(
        ResourceInsufficientError, match=rf"in {attempts} attempts?: .*logs are below /opt/elsewhere/ray-"
    ):
        local_ray._init_patiently()
    assert len(calls) == attempts


@pytest.mark.parametrize(("given", "absolute"), [("", "/tmp"), ("below", "{cwd}/below"), ("/var/tmp", "/var/tmp")])
def test_the_folder_of_ray_is_absolute(
    given: str, absolute: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a relative folder Ray's daemons wait for each other forever."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_TMPDIR", given)
    expected = f"{absolute.format(cwd=tmp_path)}/ray-{os.getuid()}"
    assert local_ray._own_folder() == {"RAY_TMPDIR": expected}
