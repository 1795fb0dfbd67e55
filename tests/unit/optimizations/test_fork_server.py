"""Forked workers equal freshly started ones, and no process outlives the driver."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from processes_for_tests import is_alive

from nemo_rl.config import PolicyConfig
from nemo_rl.models.generation.vllm.settings import engine_environment
from nemo_rl.models.policy.lm_policy import rank_environment
from nemo_rl.optimizations import fork_server, ray_worker

DRIVER = """
import io, logging, os, signal, sys, tempfile
from nemo_rl.optimizations import fork_server
kept = tempfile.TemporaryDirectory()
fork_server.PRELOADED = ("torch", "numpy")
sys.path.insert(0, "/drivers/own")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
logging.getLogger().addHandler(logging.StreamHandler())
own, sys.stdout = sys.stdout, io.StringIO()
fork_server.start_fork_server(lambda: ("wave",))
import torch
print(fork_server.server_socket(), torch.get_num_threads(), kept.name, file=own, flush=True)
sys.stdin.read()
"""
WORKER = """
import json, logging, os, random, resource, signal, sys, time
import torch
import numpy as np
print(json.dumps(dict(
    argv=sys.argv, main=__name__, path=sys.path[0], folder=os.getcwd(), color=os.environ.get("COLOR"),
    leads_group=os.getpgid(0) == os.getpid(), group=os.getpgid(0),
    term=signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    blocked=len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    child=signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, threads=torch.get_num_threads(),
    handlers=len(logging.getLogger().handlers), stdout=sys.stdout.fileno(), original=sys.__stdout__.fileno(),
    open_files=resource.getrlimit(resource.RLIMIT_NOFILE), oom_score=open("/proc/self/oom_score_adj").read().strip(),
    drawn=[random.random(), float(np.random.rand())], torch_seed=torch.initial_seed(), forked="wave" in sys.modules,
    descriptors=sorted(os.listdir("/proc/self/fd"))[:5],
)), flush=True)
if "--stay" in sys.argv:
    time.sleep(60)
sys.exit(int(sys.argv[1]))
"""
SETUP = "import sys; print('as Ray would', *sys.argv[1:])"


@pytest.fixture(scope="module")
def driver() -> Any:
    """A process with a fork server: its Popen, the socket, its number of threads, and its temporary folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment()
    )
    assert process.stdout is not None
    socket, threads, folder = process.stdout.readline().split()
    time.sleep(0.2)  # the server imports what the driver does not
    yield process, socket, int(threads), Path(folder)
    process.kill()


def _environment(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "RAY_ADDRESS")} | more


def start(folder: Path, socket: str, *arguments: str, status: str = "0", **environment: str) -> str:
    """Return the output of a process that is started as a raylet starts one."""
    (folder / "worker.py").write_text(WORKER)
    (folder / "setup.py").write_text(SETUP)
    output = folder / "output"
    with output.open("w") as stream:
        command = [
            sys.executable,
            "-I",
            "-S",
            ray_worker.__file__,
            socket,
            str(folder / "setup.py"),
            str(folder / "worker.py"),
        ]
        subprocess.run(
            # Like a raylet: set a limit, and a score that decides which workers are killed first without memory.
            ["sh", "-c", 'ulimit -Sn 777; echo 900 > /proc/self/oom_score_adj; exec "$@"', "sh"]
            + [*command, status, *arguments, "--language=PYTHON"],
            cwd=folder,
            env=_environment(**environment),
            stdout=stream,
            check=True,
            timeout=20,
        )
    end = time.monotonic() + 20
    while not output.read_text().endswith("\n"):
        assert time.monotonic() < end
        time.sleep(0.02)
    return output.read_text()


def test_a_fork_is_the_process_that_it_would_have_been(driver: Any, tmp_path: Path) -> None:
    _, socket, threads, temporary = driver
    first = json.loads(start(tmp_path, socket, "--name=a b", COLOR="blue"))
    second = json.loads(start(tmp_path, socket, status="7", OMP_NUM_THREADS="3"))
    assert first["forked"]
    assert first["argv"] == [str(tmp_path / "worker.py"), "0", "--name=a b"]
    assert (first["main"], first["path"], first["folder"]) == ("__main__", str(tmp_path), str(tmp_path))
    assert (first["color"], second["color"]) == ("blue", None)
    assert first["leads_group"] and first["group"] != second["group"]
    assert first["term"] and first["child"] and not first["blocked"]
    assert first["handlers"] == 0
    # One thread is Ray's default for workers; the driver uses as many threads as without a server.
    assert (first["threads"], second["threads"]) == (1, 3)
    assert threads == len(os.sched_getaffinity(0))
    assert not set(first["drawn"]) & set(second["drawn"])
    assert first["torch_seed"] == second["torch_seed"]
    assert first["open_files"][0] == 777 and first["oom_score"] == "900"
    assert (first["stdout"], first["original"]) == (1, 1), "the driver has replaced its own"
    assert temporary.exists(), "what the driver does when it ends is the driver's"
    assert first["descriptors"] == ["0", "1", "2", "3"], "the server's own files are closed"


def test_what_a_fork_cannot_be_is_started_as_ray_would(driver: Any, tmp_path: Path) -> None:
    _, socket, *_ = driver
    for context in (
        {"env_vars": {"LD_PRELOAD": "x"}},
        {"py_executable": "/other/python"},
        {"command_prefix": ["nice"]},
    ):
        argument = f"--serialized-runtime-env-context={json.dumps(context)}"
        assert (
            start(tmp_path, socket, argument) == f"as Ray would {tmp_path}/worker.py 0 {argument} --language=PYTHON\n"
        )
    empty = json.dumps({"env_vars": {}, "py_executable": sys.executable, "command_prefix": []})
    assert json.loads(start(tmp_path, socket, f"--serialized-runtime-env-context={empty}"))["forked"]
    assert start(tmp_path, str(tmp_path / "no-server")).startswith("as Ray would")
    for name, value in {"HF_HOME": "/elsewhere", "TORCHINDUCTOR_COMPILE_THREADS": "7"}.items():
        assert start(tmp_path, socket, **{name: value}).startswith("as Ray would"), "read when it was imported"


def test_variables_that_were_read_before_need_a_start_of_their_own() -> None:
    assert not fork_server.needs_own_start(
        {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "20000", "VLLM_X": "1", "RANK": "0"}
    )
    assert fork_server.needs_own_start({"OMP_NUM_THREADS": "2"})
    assert fork_server.needs_own_start({"OMP_WAIT_POLICY": "passive"})
    assert fork_server.needs_own_start({"HF_HUB_OFFLINE": "1"})
    assert fork_server.needs_own_start({"TORCHINDUCTOR_CACHE_DIR": "/x"})
    assert not fork_server.needs_own_start({"TORCHDYNAMO_DISABLE": "1"})


def test_ranks_and_engines_on_a_cpu_are_forked() -> None:
    assert not fork_server.needs_own_start(rank_environment(PolicyConfig.build(model_name="x"), uses_gpu=False))
    assert not fork_server.needs_own_start(engine_environment("cpu"))


@pytest.mark.parametrize("value", ["0", "4,2", "many", ""])
def test_odd_numbers_of_threads_are_read_as_openmp_does(value: str) -> None:
    assert fork_server._wanted_threads({"OMP_NUM_THREADS": value}) == (4 if value == "4,2" else 0)


def test_the_server_and_its_workers_end_with_the_driver(driver: Any, tmp_path: Path) -> None:
    process, socket, *_ = driver
    worker = json.loads(start(tmp_path, socket, "--stay"))["group"]
    assert Path(socket).exists() and is_alive(worker)
    process.kill()
    process.wait()
    end = time.monotonic() + 30
    while Path(socket).exists() or is_alive(worker):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert start(tmp_path, socket).startswith("as Ray would")


@pytest.mark.parametrize(
    "first",
    ["import ray", "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"],
    ids=["Ray is imported", "there is a thread"],
)
def test_no_server_where_a_fork_is_not_safe(first: str) -> None:
    code = f"""
{first}
import os, sys, types
from nemo_rl.optimizations import fork_server
torch = types.SimpleNamespace(set_num_threads=lambda number: None)
fork_server._preload = lambda: sys.modules.update(torch=torch)
fork_server.start_fork_server()
os._exit(fork_server.server_socket() is not None)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=_environment(), timeout=60)


STUB = """
import os, signal, sys, types
from nemo_rl.optimizations import fork_server
from nemo_rl.host.stop_signals import leave_at_once
leave_at_once()
torch = types.SimpleNamespace(set_num_threads=lambda number: None)
fork_server._preload = lambda: sys.modules.update(torch=torch)
fork = os.fork
def interrupted_fork():
    os.kill(os.getpid(), signal.SIGTERM)
    return fork()
def failing_fork():
    raise BlockingIOError("Resource temporarily unavailable")
"""


@pytest.mark.parametrize(
    ("then", "status"),
    [
        ("os.fork = interrupted_fork", 143),
        ("os.fork = failing_fork", 0),
        ("fork_server.tempfile.tempdir = 'x' * 100; os.mkdir('x' * 100)", 0),
    ],
    ids=["a signal", "no more processes", "a name too long for a socket"],
)
def test_no_folder_is_left_behind(then: str, status: int, tmp_path: Path) -> None:
    code = f"""{STUB}
{then}
fork_server.start_fork_server()
assert fork_server.server_socket() is None
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""
    environment = _environment(TMPDIR=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, timeout=60, check=False)
    assert done.returncode == status
    end = time.monotonic() + 30
    while list(tmp_path.rglob("nrl-fork-*")):
        assert time.monotonic() < end
        time.sleep(0.02)
