"""A data set of a hub on the loopback: its rows, the progress of its download, its cache, and errors."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
from hub_server import COMMIT, Hub, use_hub

from nemo_rl.config import DatasetConfig
from nemo_rl.data.datasets.hub import HubSource, load_table
from nemo_rl.host import waiting_log
from nemo_rl.utils.errors import DataError

NAME = "owner/sums"
ROWS = [{"problem": f"{number} + 1", "answer": str(number + 1), "padding": "x" * 1000} for number in range(2000)]


def json_lines(rows: list[dict[str, str]]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


FILES = {"train.jsonl": json_lines(ROWS), "test.jsonl": json_lines(ROWS[:3]), "README.md": b"# Sums"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    hub = Hub(datasets={NAME: FILES})
    server = hub.start()
    use_hub(monkeypatch, hub.address, tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.address)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "tables"))
    yield hub
    server.shutdown()
    server.server_close()


def load(name: str = NAME) -> list[dict[str, str]]:
    config = DatasetConfig.build(dataset_name="ResponseDataset", data_path=name)
    return list(load_table(config, "train", HubSource(None)).rows)  # type: ignore[arg-type]


def test_rows_arrive_with_lines_about_the_download_and_are_kept(hub, monkeypatch, caplog) -> None:
    hub.pause_s = 0.05
    monkeypatch.setattr(waiting_log, "PERIOD_S", 0.4)
    caplog.set_level(logging.INFO, "nemo_rl")
    assert load() == ROWS
    shown = re.findall(r"the download of the dataset owner/sums after \d+ s: (\d) of 3 MB have arrived", caplog.text)
    assert shown == sorted(shown) and len(set(shown)) > 1, caplog.text
    assert hub.requests.count(f"GET /datasets/{NAME}/resolve/{COMMIT}/train.jsonl") == 1

    hub.requests.clear()
    assert load() == ROWS
    assert not [request for request in hub.requests if "jsonl" in request]


def test_an_unknown_data_set_is_named(hub: Hub) -> None:
    with pytest.raises(DataError, match=r"data set 'owner/unknown' \(subset None, split 'train'\) cannot be loaded"):
        load("owner/unknown")


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("README.md", r"data set 'owner/sums' .* cannot be loaded: \w*Error: \S"),
        (".jsonl", r"The download of the dataset owner/sums from http://127\.0\.0\.1:\d+ failed: \w*Error: \S"),
    ],
)
def test_a_connection_that_always_breaks_is_named(hub, monkeypatch, broken: str, said: str) -> None:
    hub.break_after, hub.broken = 0, broken
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    with pytest.raises(DataError, match=said):
        load()
