"""Folders in places that all users share are made for one user, and refused if another user may change them."""

import os
import stat
from pathlib import Path

import pytest

from nemo_rl.config import VenvConfig
from nemo_rl.files import folders as own_folder
from nemo_rl.files.folders import is_shared, require_own
from nemo_rl.utils.errors import ConfigError, VenvError
from nemo_rl.utils.venvs import create_local_venv, venv_folder

pytestmark = pytest.mark.fast

UNUSED_ID = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")
ADVICE = "Set SOMETHING."


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A place like `/tmp`."""
    place = tmp_path / "tmp"
    place.mkdir()
    place.chmod(0o1777)
    return place


def test_a_new_folder_is_private_to_the_user(shared):
    before = os.umask(0)
    try:
        assert require_own(shared / "a", ADVICE) == shared / "a"
    finally:
        os.umask(before)
    assert mode(shared / "a") == 0o700


def test_a_folder_that_others_may_read_is_made_private(shared):
    (shared / "a").mkdir(mode=0o755)
    (shared / "a" / "kept").write_text("here")
    require_own(shared / "a", ADVICE)
    assert mode(shared / "a") == 0o700
    assert (shared / "a" / "kept").read_text() == "here"


@pytest.mark.parametrize("bits", [0o720, 0o702, 0o777, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused(shared, bits):
    (shared / "a").mkdir()
    (shared / "a").chmod(bits)
    with pytest.raises(ConfigError, match=rf"{shared}/a may be written to by others \(mode {bits:04o}\).*SOMETHING"):
        require_own(shared / "a", ADVICE)


@needs_root
def test_a_folder_of_another_user_is_refused(shared):
    (shared / "a").mkdir(mode=0o700)
    os.chown(shared / "a", UNUSED_ID, UNUSED_ID)
    with pytest.raises(ConfigError, match="belongs to another user .uid 65534"):
        require_own(shared / "a", ADVICE)


def test_links_and_files_are_refused(shared):
    (shared / "mine").mkdir(mode=0o700)
    (shared / "a").symlink_to(shared / "mine")
    (shared / "b").symlink_to(shared / "nowhere")
    (shared / "c").write_text("")
    for name, problem in (("a", "is a symbolic link"), ("b", "is a symbolic link"), ("c", "is not a folder")):
        with pytest.raises(ConfigError, match=problem):
            require_own(shared / name, ADVICE)
    assert not (shared / "nowhere").exists()


def test_a_world_writable_parent_without_sticky_bit_is_refused(shared):
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match=f"others may replace what is in {shared} .mode 0777, no sticky bit"):
        require_own(shared / "a", ADVICE)
    assert not (shared / "a").exists()


@needs_root
def test_a_parent_of_another_user_is_refused_also_through_a_link(shared, monkeypatch, tmp_path):
    monkeypatch.setattr(own_folder, "_USER_MAP", tmp_path / "none")  # as outside of user namespaces
    (shared / "theirs").mkdir(mode=0o755)
    os.chown(shared / "theirs", UNUSED_ID, UNUSED_ID)
    (shared / "link").symlink_to(shared / "theirs")
    for place in ("theirs", "link"):
        with pytest.raises(ConfigError, match=f"{shared}/theirs belongs to another user .uid 65534.*may replace"):
            require_own(shared / place / "a", ADVICE)


@needs_root
def test_in_a_user_namespace_the_hosts_root_is_trusted(shared, monkeypatch, tmp_path):
    (tmp_path / "map").write_text("         0       1000          1\n")
    monkeypatch.setattr(own_folder, "_USER_MAP", tmp_path / "map")
    (shared / "above").mkdir(mode=0o755)
    os.chown(shared / "above", UNUSED_ID, UNUSED_ID)
    assert require_own(shared / "above" / "a", ADVICE).exists()


def test_only_parents_with_a_sticky_bit_may_be_shared(shared, tmp_path):
    assert is_shared(shared / "a" / "b")
    assert is_shared(tmp_path) == is_shared(tmp_path / "x")


@pytest.fixture
def local_venvs(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NRL_FORCE_LOCAL_VENVS", "true")
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    return venv_folder()


@needs_root
def test_a_planted_interpreter_is_not_used(local_venvs):
    planted = local_venvs / "policy-0123456789ab"
    (planted / "bin").mkdir(parents=True)
    (planted / "bin" / "python").write_text("#!/bin/sh\ntouch /planted\n")
    (planted / "venv.json").write_text("{}")
    for path in (local_venvs, planted, planted / "bin", planted / "bin" / "python", planted / "venv.json"):
        os.chown(path, UNUSED_ID, UNUSED_ID)
    with pytest.raises(VenvError, match=f"{local_venvs} belongs to another user.*NEMO_RL_VENV_DIR"):
        create_local_venv(VenvConfig.build(packages=["six"]), "policy")


def test_a_folder_of_environments_that_a_group_may_write_to_is_refused(local_venvs):
    local_venvs.mkdir()
    local_venvs.chmod(0o770)
    with pytest.raises(VenvError, match="may be written to by others .mode 0770"):
        create_local_venv(VenvConfig.build(packages=["six"]), "policy")


def test_a_configured_folder_below_a_shared_parent_is_checked_too(shared, monkeypatch):
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(shared / "venvs"))
    (shared / "venvs").symlink_to("/usr")
    with pytest.raises(VenvError, match="is a symbolic link"):
        create_local_venv(VenvConfig.build(packages=["six"]), "policy")
