"""Environments of workers, made by the real uv from wheels that the tests write; no index is used."""

import errno
import importlib.util
import logging
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes_for_tests import wait_until_gone
from wheels_for_tests import make_wheel

from nemo_rl.config import ClusterConfig, VenvConfig, load_config
from nemo_rl.distributed.ray_actor_environment_registry import _agreed, get_actor_python_env, make_actor_runtime_env
from nemo_rl.utils import prefetch_venvs
from nemo_rl.utils.errors import ConfigError, DeadlineExceededError, VenvError
from nemo_rl.utils.venvs import PY_EXECUTABLES, create_local_venv, parse_py_executable, venv_folder
from nemo_rl.utils.venvs.build import ingredients_of

UV = os.environ.get("UV") or shutil.which("uv")
needs_uv = pytest.mark.skipif(UV is None, reason="uv is not here")
WrapUv = Callable[[str], Path]


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(tmp_path / "venvs"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    return tmp_path / "venvs"


@pytest.fixture
def wrap_uv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> WrapUv:
    """Wrap uv in a shell script that records each call; its own lines decide by `$1`."""

    def wrap(lines: str) -> Path:
        script, calls = tmp_path / "uv", tmp_path / "calls"
        script.write_text(f'#!/bin/bash\necho "$@" >> {calls}\n{lines}\nexec {UV} "$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("UV", str(script))
        return calls

    return wrap


def tiny(tmp_path: Path, **options: str) -> VenvConfig:
    return VenvConfig.build(packages=[make_wheel(tmp_path / "wheels", "tiny_bonus", "BONUS = 0.25\n", **options)])


def answer(python: str, expression: str) -> str:
    """Evaluate an expression in an environment, without modules that the caller's PYTHONPATH adds."""
    code = f"import importlib.metadata, sys; print({expression})"
    done = subprocess.run([python, "-E", "-c", code], check=True, capture_output=True, text=True, cwd="/")
    return done.stdout.strip()


@needs_uv
def test_an_environment_on_top_of_the_driver_is_made_once(tmp_path, wrap_uv, caplog):
    calls = wrap_uv("")
    with caplog.at_level(logging.INFO):
        with ThreadPoolExecutor() as pool:
            pythons = list(pool.map(lambda _: create_local_venv(tiny(tmp_path), "my.Env"), range(2)))
        assert create_local_venv(tiny(tmp_path), "my.Env") == pythons[0] == pythons[1]
    assert sum(line.startswith("venv ") for line in calls.read_text().splitlines()) == 1
    assert caplog.text.count("there is none yet") == 1
    assert importlib.util.find_spec("tiny_bonus") is None
    assert answer(pythons[0], "__import__('tiny_bonus').BONUS") == "0.25"
    found = answer(pythons[0], "importlib.metadata.version('ray'), __import__('nemo_rl.utils.errors').__file__")
    assert importlib.metadata.version("ray") in found and "my.Env-" in found
    assert [path.name for path in Path(pythons[0]).parents[2].iterdir() if "making" in path.name] == []


@needs_uv
def test_a_change_makes_another_environment_and_logs_the_reason(tmp_path, wrap_uv, caplog):
    caplog.set_level(logging.INFO)
    first = create_local_venv(tiny(tmp_path), "env")
    make_wheel(tmp_path / "wheels", "tiny_bonus", "BONUS = 0.5\n")
    again = VenvConfig.build(packages=[str(tmp_path / "wheels/tiny_bonus-1.0-py3-none-any.whl")])
    second = create_local_venv(again, "env")
    assert answer(second, "__import__('tiny_bonus').BONUS") == "0.5"
    wrap_uv('[ "$1" = --version ] && echo "uv 99.0" && exit')
    third = create_local_venv(again, "env")
    assert len({first, second, third}) == 3 and answer(first, "__import__('tiny_bonus').BONUS") == "0.25"
    reasons = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Making")]
    assert "another packages" in reasons[1] and "another uv" in reasons[2] and "packages" not in reasons[2][-20:]


@needs_uv
def test_a_killed_installation_leaves_no_environment_that_looks_complete(tmp_path, own_folder, wrap_uv, monkeypatch):
    wheel = tiny(tmp_path).packages[0]
    wrap_uv('[ "$1" = pip ] && kill -9 $PPID && exit')
    code = (
        "from nemo_rl.config import VenvConfig; from nemo_rl.utils.venvs import create_local_venv; "
        f"create_local_venv(VenvConfig.build(packages=[{wheel!r}]), 'env')"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == -9
    (half,) = (path for path in own_folder.iterdir() if path.is_dir())
    assert half.name.startswith(".env.making-") and (half / "bin/python").exists()
    monkeypatch.setenv("UV", str(UV))
    assert answer(create_local_venv(tiny(tmp_path), "env"), "__import__('tiny_bonus').BONUS") == "0.25"
    assert not half.exists()


@needs_uv
def test_a_forced_rebuild_happens_in_place(tmp_path, monkeypatch):
    """`prefetch_venvs` requests it; a run does so once (`create_local_venv_on_each_node`)."""
    python = Path(create_local_venv(tiny(tmp_path), "env"))
    stray = python.parent / "stray"
    stray.touch()
    assert create_local_venv(tiny(tmp_path), "env") == str(python) and stray.exists()
    monkeypatch.setenv("NRL_FORCE_REBUILD_VENVS", "true")
    cluster = ClusterConfig.build(venvs={"env": tiny(tmp_path)})
    assert prefetch_venvs.prefetch_venvs(cluster=cluster) == {"env": str(python)} and not stray.exists()


@needs_uv
def test_the_output_of_uv_reaches_the_user(tmp_path):
    with pytest.raises(VenvError, match="(?s)'env' failed in `uv pip install.*no-such-package-of-nemo-rl"):
        create_local_venv(VenvConfig.build(packages=["no-such-package-of-nemo-rl"]), "env")


def test_a_missing_uv_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(VenvError, match="pip install uv"):
        create_local_venv(tiny(tmp_path), "env")


@needs_uv
def test_a_deadline_ends_uv_and_what_it_started(tmp_path, own_folder, wrap_uv):
    wrap_uv(f'[ "$1" = venv ] && {{ sleep 60 & echo $! > {tmp_path}/child; wait; }}')
    start = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"'env' took too long \(cluster.timeouts.venv_s\), in `uv venv"):
        create_local_venv(tiny(tmp_path), "env", timeout_s=3.0)
    assert time.monotonic() - start < 45, "uv would take a minute"
    assert wait_until_gone([int((tmp_path / "child").read_text())]) == []
    assert [path.name for path in own_folder.iterdir() if path.is_dir()] == []


@needs_uv
def test_packages_that_conflict_with_the_drivers_are_refused(tmp_path):
    with pytest.raises(VenvError, match=r"tiny_bonus 1.0 needs numpy<1, but \d.* is installed.*version that fits"):
        create_local_venv(tiny(tmp_path, needs="numpy<1"), "env")


@needs_uv
def test_another_ray_is_refused(tmp_path):
    ray = make_wheel(tmp_path / "wheels", "ray", "", version="1.13.0")
    with pytest.raises(VenvError, match=r"has Python 3\S+ and Ray 1.13.0, but the driver has Python 3\S+ and Ray 2"):
        create_local_venv(VenvConfig.build(packages=[ray]), "env")


def test_an_existing_interpreter_is_checked(tmp_path):
    assert create_local_venv(f"{sys.executable} -B", "env") == f"{sys.executable} -B"
    with pytest.raises(VenvError, match="/no/such/python cannot be used"):
        create_local_venv("/no/such/python", "env")


@needs_uv
def test_extras_are_installed_at_the_locked_versions(tmp_path, wrap_uv):
    """Stops before the download: the fake uv installs nothing, so the interpreter has no Ray and is refused."""
    calls = wrap_uv('case "$1" in lock) exit;; sync) echo "into $UV_PROJECT_ENVIRONMENT" >> "$0.into"; exit;; esac')
    with pytest.raises(VenvError, match="PackageNotFoundError.*ray"):
        create_local_venv(PY_EXECUTABLES.MCORE, "policy")
    (sync,) = (line for line in calls.read_text().splitlines() if line.startswith("sync"))
    assert sync.endswith("--frozen --no-install-project --extra mcore")
    assert ".policy.making-" in (tmp_path / "uv.into").read_text()
    with pytest.raises(ConfigError, match="no extra vlm; it has agents, cpu, .*vllm"):
        create_local_venv("uv run --extra vlm", "policy")


@pytest.mark.parametrize(
    ("text", "extras", "packages", "python"),
    [
        ("uv run", [], [], None),
        (PY_EXECUTABLES.VLLM, ["vllm"], [], None),
        ("uv run --locked --extra vllm --extra=mcore --with 'a<2' --directory /x", ["vllm", "mcore"], ["a<2"], None),
        ("/opt/venv/bin/python", None, [], "/opt/venv/bin/python"),
    ],
)
def test_an_interpreter_is_described_by_path_extra_or_packages(text, extras, packages, python):
    parsed = parse_py_executable(text)
    assert parsed is not None
    assert (parsed.extras, parsed.packages, parsed.py_executable) == (extras, packages, python)


def test_the_drivers_python_is_the_default_and_other_options_are_refused():
    assert parse_py_executable(PY_EXECUTABLES.SYSTEM) is None
    assert get_actor_python_env("nemo_rl.models.policy.workers.rank.PolicyRank") == PY_EXECUTABLES.SYSTEM
    assert make_actor_runtime_env("nemo_rl.models.generation.worker.GenerationWorker") == {}
    with pytest.raises(ConfigError, match="--isolated.*--extra, --with"):
        parse_py_executable("uv run --isolated")


def test_a_folder_is_identified_by_its_sources_not_by_build_outputs(tmp_path):
    module = tmp_path / "rules" / "distributed" / "score.py"
    module.parent.mkdir(parents=True)
    module.write_text("a = 1")
    wanted = VenvConfig.build(packages=[str(tmp_path / "rules")])
    before = ingredients_of(wanted, "uv")
    for made in ("build/lib/score.py", "rules.egg-info/PKG-INFO", "src/rules.egg-info/SOURCES.txt", ".git/HEAD"):
        (tmp_path / "rules" / made).parent.mkdir(parents=True)
        (tmp_path / "rules" / made).write_text("made")
    assert ingredients_of(wanted, "uv") == before
    module.write_text("a = 2")
    assert ingredients_of(wanted, "uv") != before


def test_a_disk_without_locks_is_named(own_folder, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(VenvError, match="cannot be locked.*NEMO_RL_VENV_DIR.*NRL_FORCE_LOCAL_VENVS"):
        create_local_venv(VenvConfig.build(packages=["six"]), "locked")


def test_environments_are_in_the_configured_folder(monkeypatch, own_folder):
    assert venv_folder() == own_folder
    monkeypatch.setenv("NRL_FORCE_LOCAL_VENVS", "true")
    assert venv_folder().name == f"nemo_rl_venvs_{os.getuid()}"


def test_nodes_that_fail_or_differ_are_named():
    good = ("10.0.0.1", "/v/env-1/bin/python", "")
    assert _agreed("env", [good, ("10.0.0.2", *good[1:])]) == good[1]
    with pytest.raises(VenvError, match=r"(?s)missing on 1 of 2 nodes:\nnode 10.0.0.2: no disk"):
        _agreed("env", [good, ("10.0.0.2", "", "no disk")])
    with pytest.raises(VenvError, match="10.0.0.1: /v/env-1/bin/python; 10.0.0.2: /v/env-2"):
        _agreed("env", [good, ("10.0.0.2", "/v/env-2/bin/python", "")])


def test_the_config_names_kinds_of_workers(tmp_path):
    path = "examples/configs/grpo_math_cpu.yaml"
    config = load_config(path, ["cluster.venvs.math.packages=[six]", "+cluster.venvs.generation.extras=[vllm]"])
    assert config.cluster.venvs["math"].packages == ["six"]
    assert config.cluster.venvs["generation"].extras == ["vllm"]
    with pytest.raises(ConfigError, match="cluster.venvs.maths: this run has no such workers.*Did you mean 'math'"):
        load_config(path, ["cluster.venvs.maths.packages=[six]"])
    with pytest.raises(ConfigError, match=r"(?s)cluster.venvs.math.*package.*packages"):
        load_config(path, ["cluster.venvs.math.package=[six]"])
    for wrong in ("{}", "{py_executable: /x, extras: []}"):
        with pytest.raises(ConfigError, match="or a py_executable"):
            load_config(path, [f"cluster.venvs.math={wrong}"])


def test_prefetching_chooses_by_text(monkeypatch, tmp_path):
    monkeypatch.setenv("SIX", "six")
    made: list[tuple[str, str]] = []
    monkeypatch.setattr(
        prefetch_venvs, "create_local_venv", lambda venv, name, force, timeout_s: made.append(name) or "/py"
    )
    (tmp_path / "run.yaml").write_text(
        "cluster: {venvs: {policy: {extras: [mcore]}, generation: {extras: [vllm]}, "
        "game: {packages: ['${oc.env:SIX}']}}}\n"
        "other: ${not.there}\n"
    )
    for arguments, names in (
        ([], ["policy", "generation", "game"]),
        (["vllm", "six"], ["generation", "game"]),
        (["--negative-filters", "mcore", "game"], ["generation"]),
    ):
        made.clear()
        prefetch_venvs.main(["--config", str(tmp_path / "run.yaml"), *arguments])
        assert made == names
    assert prefetch_venvs.prefetch_venvs(cluster=ClusterConfig()) == {}
