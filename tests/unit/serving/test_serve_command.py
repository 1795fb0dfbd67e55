"""`nemo_rl serve` writes its address, answers, and ends with a signal."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_models import FakeModels
from running import Raw, config_in, pass_body, service
from test_restart import ROWS, normal, play

from nemo_rl.__main__ import main
from nemo_rl.commands import service_checks
from nemo_rl.commands.serve import serve
from nemo_rl.config import REPOSITORY_ROOT, load_config
from nemo_rl.config.runs.service import ServiceMasterConfig
from nemo_rl.launch.command_line import exit_status
from nemo_rl.serving.store.base import check_folder, note_base

HERE = Path(__file__).parent
CONFIG = REPOSITORY_ROOT / "examples/configs/serve_cpu.yaml"
PROGRAM = """
import sys
from fake_models import FakeModels
from nemo_rl.commands.serve import serve
from nemo_rl.config import load_config
from nemo_rl.config.runs.service import ServiceMasterConfig

config = load_config(sys.argv[1], sys.argv[2:], schema=ServiceMasterConfig)
ended = []
status = serve(config, lambda config: (FakeModels(), lambda: ended.append(True)))
assert ended == [True]
sys.exit(status)
"""


def test_the_shipped_file_is_one_of_the_service():
    config = load_config(CONFIG, schema=ServiceMasterConfig)
    assert config.service.host == "127.0.0.1"
    assert config.policy.generation is not None


def test_it_serves_until_a_signal(tmp_path):
    path = os.pathsep.join([str(HERE), str(REPOSITORY_ROOT), os.environ.get("PYTHONPATH", "")])
    overrides = ["service.port=0", f"service.state_dir={tmp_path / 'state'}", "service.log_dir=null"]
    command = [sys.executable, "-c", PROGRAM, str(CONFIG), *overrides]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("Serving on http://127.0.0.1:")
        client = Raw(line.split()[-1])
        names = [each["model_name"] for each in client.get("get_server_capabilities")["supported_models"]]
        assert names[0] == "tiny-chat"
        session = client.session()
        made = client.ok("create_model", session_id=session, model_seq_id=0, base_model="tiny-chat")
        assert client.result(made["request_id"])["model_id"] == f"{session}:train:0"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()


def test_a_dry_run_describes_the_service(capsys, tmp_path):
    keys = tmp_path / "keys.txt"
    keys.write_text("tml-1 alice\ntml-2 bob\ntml-3 alice\n")
    state = tmp_path / "state"
    overrides = ["service.port=0", f"service.keys_file={keys}", f"service.state_dir={state}", "service.log_dir=null"]
    assert main(["serve", str(CONFIG), "--dry-run", *overrides]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  address       http://127.0.0.1:0" in lines
    assert f"  users         2 of {keys}: alice, bob" in lines
    assert f"  state         {state}" in lines
    assert any(line.startswith("  models        tiny-chat, ") for line in lines)
    assert any(line.startswith("  generation    1 engine of 1 device") for line in lines)
    assert lines[-1] == "  it can start here"
    assert not state.exists()


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("service.max_resident_models=1000000", "GiB of each device"),
        ("policy.dtensor_cfg.tensor_parallel_size=2", "tensor_parallel_size=2"),
        ("service.keys_file=none.txt", "none.txt cannot be read"),
        ("service.state_dir=/proc/none", "service.state_dir='/proc/none' cannot be written"),
        ("policy.model_name=examples/assets/none", "examples/assets/none"),
    ],
)
def test_a_dry_run_finds_what_a_start_would_find(capsys, override, text):
    status = 1 if "resident" in override else 2
    assert main(["serve", str(CONFIG), "--dry-run", "service.port=0", override]) == status
    assert text in capsys.readouterr().err


def test_a_dry_run_finds_a_used_port(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", str(CONFIG), "--dry-run", f"service.port={port}"]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def refused(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """Return the error of a start, which may not start any model."""
    config = load_config(CONFIG, ["service.log_dir=null", *overrides], schema=ServiceMasterConfig)
    status = exit_status(lambda: serve(config, lambda config: pytest.fail("the models were started")))
    assert status == 2
    return capsys.readouterr().err


def test_a_used_port_is_refused_before_the_models_start(capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        told = refused(capsys, f"service.port={port}", f"service.state_dir={tmp_path / 'state'}")
    assert f"service: cannot listen on 127.0.0.1:{port}" in told
    assert not (tmp_path / "state").exists()


def test_a_used_folder_is_refused_before_the_models_start(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(service_checks, "LOCK_S", 0.2)
    command = [sys.executable, "-c", LOCK, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        told = refused(capsys, "service.port=0", f"service.state_dir={tmp_path}")
        other.communicate("end")
    assert f"service.state_dir: {tmp_path} is used by another service" in told


def changed_base(folder: Path, change: Callable[[Path], None]) -> Path:
    shutil.copytree(REPOSITORY_ROOT / "examples/assets/tiny-chat", folder)
    change(folder)
    return folder


def change_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def change_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))


@pytest.mark.parametrize("change", [change_weights, change_config])
def test_the_folder_of_another_base_is_refused_before_the_models_start(capsys, tmp_path, change):
    state, base = tmp_path / "state", load_config(CONFIG, schema=ServiceMasterConfig).policy
    note_base(state, base)
    other = changed_base(tmp_path / "other", change)
    told = refused(capsys, "service.port=0", f"service.state_dir={state}", f"policy.model_name={other}")
    assert f"the models in {state} were trained on another base, '{base.model_name}'" in told
    assert f"policy.model_name='{other}'" in told
    same = changed_base(tmp_path / "same", lambda folder: None)
    check_folder(state, base.model_copy(update={"model_name": str(same)}), 64)  # the same files in another place


def test_a_folder_with_larger_adapters_is_refused_before_the_models_start(capsys, tmp_path):
    with service(FakeModels(), config_in(tmp_path)) as url:
        client = Raw(url)
        client.model(client.session(), rank=8)
    told = refused(capsys, "service.port=0", f"service.state_dir={tmp_path}", "service.max_rank=4")
    assert "model.json describes an adapter of rank 8, and service.max_rank=4" in told


HANGING = """
import asyncio, sys, time
from fake_models import FakeModels
from nemo_rl.commands.serve import serve
from nemo_rl.config import load_config
from nemo_rl.config.runs.service import ServiceMasterConfig

hangs, *arguments = sys.argv[1:]

class Hanging(FakeModels):
    async def _work(self, what, name):
        if what == hangs:
            print("hangs in", what, flush=True)
            await asyncio.to_thread(time.sleep, 3)  # it cannot be cancelled, as the ranks
        await super()._work(what, name)

config = load_config(arguments[0], arguments[1:], schema=ServiceMasterConfig)
sys.exit(serve(config, lambda config: (Hanging(), lambda: None)))
"""

LOCK = """
import sys
from pathlib import Path
from nemo_rl.files.folders import FolderLock
lock = FolderLock(Path(sys.argv[1]))
assert lock.acquire()
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("number", "hangs"), [(signal.SIGTERM, "backward"), (signal.SIGINT, "update"), (signal.SIGTERM, "save")]
)
def test_a_signal_during_a_command_ends_in_time_and_loses_nothing(tmp_path, number, hangs):
    with service(FakeModels(), config_in(tmp_path / "alone")) as url:
        _, expected = trained(Raw(url), "tiny", saves=True)
    path = os.pathsep.join([str(HERE), str(REPOSITORY_ROOT), os.environ.get("PYTHONPATH", "")])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    overrides = [f"service.port={port}", f"service.state_dir={tmp_path / 'state'}", "service.log_dir=null"]
    found: list[Any] = []
    thread: threading.Thread | None = None
    for step, signal_number in ((hangs, number), ("", signal.SIGTERM)):
        command = [sys.executable, "-c", HANGING, step, str(CONFIG), *overrides]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})
        assert process.stdout is not None
        try:
            client = Raw(process.stdout.readline().split()[-1])
            if thread is None:
                thread = threading.Thread(target=lambda client=client: found.append(trained(client, "tiny-chat", True)))
                thread.start()
                assert process.stdout.readline() == f"hangs in {hangs}\n"
            else:
                thread.join(180)
                assert not thread.is_alive()
            process.send_signal(signal_number)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert found[0][1] == expected


LOSS = """
import sys
from fake_models import FakeModels
from nemo_rl.commands.serve import serve
from nemo_rl.config import load_config
from nemo_rl.config.runs.service import ServiceMasterConfig
from nemo_rl.launch.command_line import exit_status
from nemo_rl.utils.errors import WorkerDiedError

class Mortal(FakeModels):
    \"\"\"Its process dies during the second update, and later at each pass with the token 13.\"\"\"

    updates = 0

    async def update(self, adapter, params):
        Mortal.updates += 1
        if Mortal.updates == 2:
            raise WorkerDiedError("Worker rank-0 died.")
        return await super().update(adapter, params)

    async def run_pass(self, adapter, data, loss, *, backward):
        if 13 in data[0].token_ids:
            raise WorkerDiedError("Worker rank-0 died again.")
        return await super().run_pass(adapter, data, loss, backward=backward)

config = load_config(sys.argv[1], sys.argv[2:], schema=ServiceMasterConfig)
starts = iter(STARTS)

def start(config):
    if next(starts) == "dies":
        raise WorkerDiedError("Worker rank-0 died during its start.")
    return Mortal(), lambda: None

sys.exit(exit_status(lambda: serve(config, start)))
"""


def trained(client: Raw, base: str, saves: bool = False) -> tuple[str, list[bytes]]:
    """Make two updates, save at the end if wanted, and return the model and all results."""
    session = client.session()
    model = f"{session}:train:0"
    step = {"model_id": model, "adam_params": {"learning_rate": 0.1}}
    requests = [
        ("create_model", {"session_id": session, "model_seq_id": 0, "base_model": base, "lora_config": {"seed": 4}}),
        ("forward_backward", pass_body(model, 1, ROWS)),
        ("optim_step", {**step, "seq_id": 2}),
        ("forward_backward", pass_body(model, 3, ROWS)),
        ("optim_step", {**step, "seq_id": 4}),
    ]
    if saves:
        requests.append(("save_weights", {"model_id": model, "seq_id": 5, "path": "end"}))
        requests.append(("forward_backward", pass_body(model, 6, ROWS, forward_only=True)))
    return model, normal(play(client, requests, 120), session)


def test_models_that_lose_a_process_are_started_again(tmp_path):
    """The same port continues, also after a loss during a start, and the service ends when losses are too frequent."""
    path = os.pathsep.join([str(HERE), str(REPOSITORY_ROOT), os.environ.get("PYTHONPATH", "")])
    overrides = ["service.port=0", f"service.state_dir={tmp_path / 'state'}", "service.log_dir=null"]
    program = LOSS.replace("STARTS", "['lives', 'dies', *['lives'] * 9]")
    command = [sys.executable, "-c", program, str(CONFIG), *overrides, "cluster.max_run_restarts=3"]
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        with service(FakeModels(), config_in(tmp_path / "alone")) as url:
            _, expected = trained(Raw(url), "tiny")
        client = Raw(line.split()[-1])
        model, found = trained(client, "tiny-chat")
        assert found == expected
        assert process.stdout.readline() == line, "the same address"
        with contextlib.suppress(httpx.TransportError):
            client.submit_pass(model, 5, [[13, 14, 15]])
        _, text = process.communicate(timeout=30)
        assert process.returncode == 1
        assert "\nWorkerDiedError: Worker rank-0 died again.\n" in text
        assert "Traceback" not in text, text
    finally:
        process.kill()


def test_models_that_do_not_start_end_the_service(tmp_path):
    path = os.pathsep.join([str(HERE), str(REPOSITORY_ROOT), os.environ.get("PYTHONPATH", "")])
    overrides = ["service.port=0", f"service.state_dir={tmp_path / 'state'}", "service.log_dir=null"]
    command = [sys.executable, "-c", LOSS.replace("STARTS", "['dies']"), str(CONFIG), *overrides]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 1
    assert "\nWorkerDiedError: Worker rank-0 died during its start.\n" in done.stderr


@pytest.mark.parametrize(
    ("override", "text"),
    [("service.host=0.0.0.0", "keys_file"), ("service.prot=1", "prot"), ("service.max_rank=0", "max_rank")],
)
def test_wrong_keys_are_refused(capsys, override, text):
    assert main(["serve", str(CONFIG), override]) == 2
    assert text in capsys.readouterr().err
