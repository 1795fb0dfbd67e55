"""Downloads from a hub on the loopback: what arrives, the bar, the lines, requests that are saved, and errors."""

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

pytestmark = pytest.mark.fast

MODEL = "owner/name"
INDEX = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
FILES = {
    "config.json": b"{}",
    "tokenizer.model": b"words",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "part-1.safetensors": os.urandom(2_500_000),
    "part-2.safetensors": os.urandom(1_500_000),
    "consolidated.safetensors": os.urandom(4_000_000),
    "original/config.json": b"[]",
    "README.md": b"# A model",
}
PROGRAM = """
import sys
import huggingface_hub.constants
from nemo_rl.algorithms.setup.model_downloads import download_models
from nemo_rl.host import waiting_log
from nemo_rl.launch.command_line import exit_status

huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 1 << 16
waiting_log.SHOWN_AFTER_S, waiting_log.PERIOD_S = 0.0, 0.4

def work():
    download_models(sys.argv[1:])
    return 0

sys.exit(exit_status(work))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub(models={MODEL: FILES})
    server = hub.start()
    yield hub
    server.shutdown()
    server.server_close()


@pytest.fixture
def settings(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """The environment of a program that uses the hub, with an empty cache."""
    named = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "cache"), "RAY_ADDRESS": ""}
    return named | {"HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def on_pipe(settings: dict[str, str], *names: str, program: str = PROGRAM) -> tuple[int, str]:
    command = [sys.executable, "-c", program, *names]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stderr


def arrived(settings: dict[str, str]) -> dict[str, bytes]:
    """Return the files of the model in the cache."""
    folder = Path(settings["HF_HOME"], "hub/models--owner--name/snapshots", COMMIT)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_pipe_gets_lines_and_the_cache_the_files_that_are_read(hub: Hub, settings: dict[str, str]) -> None:
    hub.pause_s = 0.04
    status, output = on_pipe(settings, MODEL)
    assert status == 0, output
    unread = ("consolidated.safetensors", "original/config.json", "README.md")
    assert arrived(settings) == {name: content for name, content in FILES.items() if name not in unread}
    lines = [line for line in output.splitlines() if "Still waiting" in line]
    assert lines and "\x1b" not in output and BAR not in output
    pattern = r"the download of the model owner/name after \d+ s: (\d) of 4 MB have arrived(, about \d+ s left)?\.$"
    shown = [re.search(pattern, line) for line in lines]
    assert all(shown), lines
    counts = [int(found[1]) for found in shown if found]
    assert counts == sorted(counts) and len(set(counts)) > 1

    hub.requests.clear()
    status, output = on_pipe(settings, MODEL)
    assert (status, output, hub.requests) == (0, "", [])


def test_a_terminal_has_a_bar_with_the_time_left_until_the_end(hub: Hub, settings: dict[str, str]) -> None:
    hub.pause_s = 0.06
    status, output = on_terminal(MODEL, program=PROGRAM, **settings)
    assert status == 0, output
    bars = [line for line in lines_of(output) if BAR in line]
    assert bars and all("the download of the model" in line for line in bars)
    counts = [int(found[1]) for line in bars if (found := re.search(r"(\d)/4 ", line))]
    assert counts == sorted(counts) and len(set(counts)) > 1
    assert any(re.search(r"[1-3]/4 0:00:0\d 0:00:0\d", line) for line in bars), bars
    assert "Still waiting" not in output and BAR not in lines_of(output)[-1]


def test_a_broken_connection_is_continued_where_it_broke(hub: Hub, settings: dict[str, str]) -> None:
    hub.break_after = 1_000_000
    status, output = on_pipe(settings, MODEL)
    assert status == 0, output
    assert arrived(settings)["part-1.safetensors"] == FILES["part-1.safetensors"]
    assert hub.requests.count(f"GET /{MODEL}/resolve/{COMMIT}/part-1.safetensors") == 3


def test_a_connection_that_always_breaks_is_named(hub: Hub, settings: dict[str, str]) -> None:
    hub.break_after = 0
    program = "import time; time.sleep = lambda seconds: None" + PROGRAM
    status, output = on_pipe(settings, MODEL, program=program)
    said = " ".join(output.split())
    assert status == 1
    assert re.search(rf"The download of the model {MODEL} from {hub.address} failed: \w*Error: \S", said), output
    assert "the same command continues" in said


def test_an_unknown_repository_is_named(hub: Hub, settings: dict[str, str]) -> None:
    status, output = on_pipe(settings, "owner/unknown")
    said = " ".join(output.split())
    assert status == 1
    assert f"The download of the model owner/unknown from {hub.address} failed: " in said
    assert "404" in said or "NotFound" in said


def test_a_hub_that_does_not_answer_is_named_and_a_cached_model_needs_none(settings: dict[str, str]) -> None:
    assert on_pipe(settings, MODEL)[0] == 0
    gone = settings | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert on_pipe(gone, MODEL) == (0, "")
    status, output = on_pipe(gone, "owner/other")
    assert status == 1
    assert "The download of the model owner/other from http://127.0.0.1:9 failed" in " ".join(output.split())


def test_a_joined_cluster_downloads_where_its_ranks_are(hub: Hub, settings: dict[str, str]) -> None:
    assert on_pipe(settings | {"RAY_ADDRESS": "10.0.0.1:6379"}, MODEL) == (0, "")
    assert hub.requests == []
