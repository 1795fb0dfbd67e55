"""`nemo_rl serve` writes its address, answers, and ends with a signal."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from fake_models import FakeModels
from running import Raw, config_in, pass_body, service
from test_restart import ROWS, normal, play

from nemo_rl.__main__ import main
from nemo_rl.config import REPOSITORY_ROOT, load_config
from nemo_rl.config.runs.service import ServiceMasterConfig

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
        ("policy.dtensor_cfg.tensor_parallel_size=2", "tensor_parallel_size=2"),
        ("service.keys_file=none.txt", "none.txt cannot be read"),
        ("service.state_dir=/proc/none", "service.state_dir='/proc/none' cannot be written"),
        ("policy.model_name=examples/assets/none", "examples/assets/none"),
    ],
)
def test_a_dry_run_finds_what_a_start_would_find(capsys, override, text):
    assert main(["serve", str(CONFIG), "--dry-run", "service.port=0", override]) == 2
    assert text in capsys.readouterr().err


def test_a_dry_run_finds_a_used_port(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", str(CONFIG), "--dry-run", f"service.port={port}"]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


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
sys.exit(exit_status(lambda: serve(config, lambda config: (Mortal(), lambda: None))))
"""


def trained(client: Raw, base: str) -> tuple[str, list[bytes]]:
    """Make two updates, and return the model and all results."""
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
    return model, normal(play(client, requests, 30), session)


def test_models_that_lose_a_process_are_started_again(tmp_path):
    """The same port continues, and the service ends when losses are too frequent."""
    path = os.pathsep.join([str(HERE), str(REPOSITORY_ROOT), os.environ.get("PYTHONPATH", "")])
    overrides = ["service.port=0", f"service.state_dir={tmp_path / 'state'}", "service.log_dir=null"]
    command = [sys.executable, "-c", LOSS, str(CONFIG), *overrides, "cluster.max_run_restarts=2"]
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


@pytest.mark.parametrize(
    ("override", "text"),
    [("service.host=0.0.0.0", "keys_file"), ("service.prot=1", "prot"), ("service.max_rank=0", "max_rank")],
)
def test_wrong_keys_are_refused(capsys, override, text):
    assert main(["serve", str(CONFIG), override]) == 2
    assert text in capsys.readouterr().err
