"""`nemo_rl serve` writes its address, answers, and ends with a signal."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from running import Raw

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


@pytest.mark.parametrize(
    ("override", "text"),
    [("service.host=0.0.0.0", "keys_file"), ("service.prot=1", "prot"), ("service.max_rank=0", "max_rank")],
)
def test_wrong_keys_are_refused(capsys, override, text):
    assert main(["serve", str(CONFIG), override]) == 2
    assert text in capsys.readouterr().err
