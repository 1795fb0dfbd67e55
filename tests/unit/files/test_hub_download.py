"""Downloads from a hub on the loopback: what arrives, the bar, the lines, requests that are saved, and errors."""

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hub_server import COMMIT, Hub, use_hub
from pseudo_terminal import BAR, lines_of, on_terminal

from nemo_rl.files import hub_download
from nemo_rl.files.hub_download import download
from nemo_rl.host import waiting_log
from nemo_rl.models.huggingface.tensor_files import download_models, model_folder
from nemo_rl.utils.errors import DownloadError

MODEL = "owner/name"
TINY_CHAT = Path(__file__).resolve().parents[3] / "examples/assets/tiny-chat"
INDEX = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
FILES = {
    "config.json": b"{}",
    "tokenizer_config.json": b"{}",
    "tokenizer.model": b"words",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "part-1.safetensors": os.urandom(2_500_000),
    "part-2.safetensors": os.urandom(1_500_000),
    "consolidated.safetensors": os.urandom(4_000_000),
    "original/config.json": b"[]",
    "README.md": b"# A model",
}
LEFT_OUT = ("consolidated.safetensors", "original/config.json", "README.md")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    hub = Hub(models={MODEL: FILES})
    server = hub.start()
    use_hub(monkeypatch, hub.address, tmp_path / "cache")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield hub
    server.shutdown()
    server.server_close()


def arrived(cache: Path) -> dict[str, bytes]:
    """Return the files of the model in the cache."""
    folder = cache / "models--owner--name/snapshots" / COMMIT
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_files_that_are_read_arrive_and_lines_count_them(hub, tmp_path, monkeypatch, caplog) -> None:
    hub.pause_s = 0.04
    monkeypatch.setattr(waiting_log, "PERIOD_S", 0.4)
    caplog.set_level(logging.INFO, "nemo_rl")
    download_models([MODEL, str(tmp_path), MODEL])
    assert arrived(tmp_path / "cache") == {name: content for name, content in FILES.items() if name not in LEFT_OUT}
    pattern = r"the download of the model owner/name after \d+ s: (\d) of 4 MB have arrived(, about \d+ s left)?\.$"
    shown = [found for line in caplog.messages if (found := re.search(pattern, line))]
    counts = [int(found[1]) for found in shown]
    assert counts == sorted(counts) and len(set(counts)) > 1, caplog.text
    assert any(found[2] for found in shown)

    hub.requests.clear()
    download_models([MODEL])
    assert model_folder(MODEL) == tmp_path / "cache/models--owner--name/snapshots" / COMMIT
    assert hub.requests == []


def test_files_that_lack_in_the_cache_are_asked_for(hub: Hub, tmp_path: Path) -> None:
    for name in ("tokenizer_config.json", "part-2.safetensors"):
        folder = model_folder(MODEL)
        (folder / name).resolve().unlink()
        (folder / name).unlink()
        assert model_folder(MODEL) == folder
        assert (folder / name).read_bytes() == FILES[name]


def test_a_rank_asks_the_hub_for_nothing_that_is_in_the_cache(hub: Hub, tmp_path: Path) -> None:
    hub.models = {MODEL: {path.name: path.read_bytes() for path in TINY_CHAT.iterdir()}}
    program = f"""
import urllib.request
from nemo_rl.models.huggingface.load import load_causal_lm
from nemo_rl.models.huggingface.tensor_files import model_folder

model_folder({MODEL!r})
urllib.request.urlopen("{hub.address}/{MODEL}/resolve/main/README.md").read()
load_causal_lm({MODEL!r})
"""
    settings = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    subprocess.run([sys.executable, "-c", program], env=os.environ | settings, check=True, timeout=100)
    marker = hub.requests.index(f"GET /{MODEL}/resolve/main/README.md")
    assert any("model.safetensors" in request for request in hub.requests[:marker])
    assert hub.requests[marker + 1 :] == []


def test_of_ranks_that_start_together_one_asks_the_hub(hub: Hub, tmp_path: Path, monkeypatch) -> None:
    with ThreadPoolExecutor(4) as ranks:
        (folder,) = set(ranks.map(model_folder, [MODEL] * 4))
    together = len(hub.requests)
    use_hub(monkeypatch, hub.address, tmp_path / "of one rank")
    assert model_folder(MODEL).name == folder.name
    assert together == len(hub.requests) - together > 0


def test_files_whose_size_the_hub_does_not_say_arrive_too(hub, tmp_path, monkeypatch) -> None:
    ask = hub_download._files

    def without_sizes(*arguments: Any) -> Any:
        return [dataclasses.replace(file, file_size=None) for file in ask(*arguments)]

    monkeypatch.setattr(hub_download, "_files", without_sizes)
    download_models([MODEL])
    assert arrived(tmp_path / "cache") == {name: content for name, content in FILES.items() if name not in LEFT_OUT}


def test_a_terminal_has_a_bar_with_the_time_left_until_the_end(hub: Hub, tmp_path: Path) -> None:
    hub.pause_s = 0.06
    program = f"""
import huggingface_hub.constants
from nemo_rl.files.hub_download import download
from nemo_rl.host import waiting_log

huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 1 << 16
waiting_log.SHOWN_AFTER_S = 0.0
download({MODEL!r}, ["part-*"])
"""
    settings = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    status, output = on_terminal(program=program, **settings)
    assert status == 0, output
    bars = [line for line in lines_of(output) if BAR in line]
    assert bars and all("the download of the model" in line for line in bars)
    counts = [int(found[1]) for line in bars if (found := re.search(r"(\d)/4 ", line))]
    assert counts == sorted(counts) and len(set(counts)) > 1
    assert any(re.search(r"[1-3]/4 0:00:0\d 0:00:0\d", line) for line in bars), bars
    assert "Still waiting" not in output and BAR not in lines_of(output)[-1]


def test_a_broken_connection_is_continued_where_it_broke(hub: Hub) -> None:
    hub.break_after = 1_000_000
    folder = download(MODEL, ["part-1.safetensors"])
    assert (folder / "part-1.safetensors").read_bytes() == FILES["part-1.safetensors"]
    assert hub.requests.count(f"GET /{MODEL}/resolve/{COMMIT}/part-1.safetensors") == 3


def test_a_connection_that_always_breaks_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.break_after = 0
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    said = rf"The download of the model {MODEL} from {hub.address} failed: \w*Error: \S.*the same command continues"
    with pytest.raises(DownloadError, match=said):
        download(MODEL, ["part-1.safetensors"])


def test_an_unknown_repository_is_named(hub: Hub) -> None:
    said = rf"The download of the model owner/unknown from {hub.address} failed: (?s:.*)404"
    with pytest.raises(DownloadError, match=said):
        download_models(["owner/unknown"])


def test_without_the_hub_a_cached_model_is_used_and_another_one_is_refused(hub, tmp_path, monkeypatch) -> None:
    there = model_folder(MODEL)
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    download_models([MODEL])
    assert model_folder(MODEL) == there
    with pytest.raises(DownloadError, match=r"owner/other from http://127\.0\.0\.1:9 failed"):
        download_models(["owner/other"])


def test_a_joined_cluster_downloads_where_its_ranks_are(hub, tmp_path, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO, "nemo_rl")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    download_models([MODEL, str(tmp_path)])
    assert hub.requests == []
    assert f"cluster at 10.0.0.1:6379 that do not have {MODEL} download it by themselves" in caplog.text
    model_folder(MODEL)
    caplog.clear()
    download_models([MODEL])
    assert caplog.text == ""
