"""A data set of a hub on the loopback: its rows, the progress of its download, its cache, and errors."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import COMMIT, Hub
from pseudo_terminal import BAR, lines_of, on_terminal

NAME = "owner/sums"
ROWS = [{"problem": f"{number} + 1", "answer": str(number + 1), "padding": "x" * 1000} for number in range(2000)]


def json_lines(rows: list[dict[str, str]]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


FILES = {"train.jsonl": json_lines(ROWS), "test.jsonl": json_lines(ROWS[:3]), "README.md": b"# Sums"}
PROGRAM = """
import sys
import huggingface_hub.constants
from nemo_rl.config import DatasetConfig
from nemo_rl.data.datasets.hub import HubSource, load_table
from nemo_rl.host import waiting_log
from nemo_rl.launch.command_line import exit_status

huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 1 << 16
waiting_log.SHOWN_AFTER_S, waiting_log.PERIOD_S = 0.0, 0.4

def work():
    config = DatasetConfig.build(dataset_name="ResponseDataset", data_path=sys.argv[1])
    rows = list(load_table(config, "train", HubSource(None)).rows)
    print(len(rows), rows[7]["problem"], rows[7]["answer"])
    return 0

sys.exit(exit_status(work))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub(datasets={NAME: FILES})
    server = hub.start()
    yield hub
    server.shutdown()
    server.server_close()


@pytest.fixture
def settings(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """The environment of a program that uses the hub, with an empty cache."""
    named = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
    return named | {"NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_DATASETS_OFFLINE": "0"}


def on_pipe(settings: dict[str, str], name: str = NAME) -> tuple[int, str, str]:
    command = [sys.executable, "-c", PROGRAM, name]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout, done.stderr


def test_rows_arrive_with_lines_about_the_download_and_are_kept(hub: Hub, settings: dict[str, str]) -> None:
    hub.pause_s = 0.05
    status, printed, output = on_pipe(settings)
    assert (status, printed) == (0, "2000 7 + 1 8\n"), output
    shown = re.findall(r"the download of the dataset owner/sums after \d+ s: (\d) of 3 MB have arrived", output)
    assert shown == sorted(shown) and len(set(shown)) > 1, output
    asked = [request for request in hub.requests if request.startswith("GET") and "/resolve/" in request]
    assert asked.count(f"GET /datasets/{NAME}/resolve/{COMMIT}/train.jsonl") == 1

    hub.requests.clear()
    status, printed, output = on_pipe(settings)
    assert (status, printed) == (0, "2000 7 + 1 8\n"), output
    assert not [request for request in hub.requests if "jsonl" in request]


def test_a_terminal_has_a_bar(hub: Hub, settings: dict[str, str]) -> None:
    hub.pause_s = 0.06
    status, output = on_terminal(NAME, program=PROGRAM, **settings)
    assert status == 0, output
    bars = [line for line in lines_of(output) if BAR in line and "the download of the dataset" in line]
    assert any(re.search(r"[1-2]/3 ", line) for line in bars), output


def test_an_unknown_data_set_and_a_connection_that_breaks_are_named(hub: Hub, settings: dict[str, str]) -> None:
    status, _, output = on_pipe(settings, "owner/unknown")
    assert status == 2
    assert "data set 'owner/unknown' (subset None, split 'train') cannot be loaded" in " ".join(output.split())
    hub.break_after = 0
    status, _, output = on_pipe(settings)
    said = " ".join(output.split())
    assert status == 2
    assert f"The download of the dataset {NAME} from {hub.address} failed: " in said
