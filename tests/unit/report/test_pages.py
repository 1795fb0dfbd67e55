"""The page as a file and from a server: what a stranger may put into it, and who may read it."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from stored_run import HOSTILE, add_step, write_run

from nemo_rl.__main__ import main
from nemo_rl.commands.report.run_files import find_run
from nemo_rl.commands.report.server import RunServer, listener

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def data_of(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, object] = json.loads(found[1])
    return data


def test_a_report_has_everything_and_nothing_of_a_run_is_html(tmp_path: Path) -> None:
    write_run(tmp_path / "a", steps=3, text=HOSTILE)
    write_run(tmp_path / "b", steps=3, seed=2)
    output = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(output), "--samples", "8"]) == 0
    page = output.read_text(encoding="utf-8")
    assert "onerror" in page and "<img" not in page and page.count("</script>") == 2
    first, second = data_of(page)["runs"]  # type: ignore[misc]
    assert first["samples"]["details"]["1"]["messages"][1]["content"] == HOSTILE
    assert (len(first["samples"]["rows"]), len(first["samples"]["details"])) == (12, 8)
    assert second["facts"]["seed"] == 2 and first["status"]["status"] == "finished"
    assert not re.search(r"https?://(?!www\.w3\.org)", re.sub(r"/\*.*?\*/", "", page.split("<body>")[0]))
    assert len(page) < 5_000_000


def test_runs_of_the_same_name_are_told_apart_and_files_of_rows_are_compared_by_content(tmp_path: Path) -> None:
    for name in ("first", "second"):
        rows = {"train": {"data_path": f"/home/{name}/data/rows-0123456789ab.jsonl"}}
        write_run(tmp_path / name / "logs", steps=2, config={"data": rows})
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "report.html")]) == 0
    first, second = data_of((tmp_path / "report.html").read_text(encoding="utf-8"))["runs"]  # type: ignore[misc]
    assert (first["name"], second["name"]) == ("first/logs/exp_001", "second/logs/exp_001")
    assert first["config"]["data.train.data_path"] == "rows-0123456789ab.jsonl"
    assert first["config"] == second["config"]


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_draws_the_report_and_runs_no_script_of_a_sample(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3, text=HOSTILE)
    output = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "--output", str(output)]) == 0
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=3000", "--dump-dom", f"file://{output}"]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout
    assert re.search(r"<h1 id=\"title\">[^<]*exp_001</h1>", drawn) and "owned</title>" not in drawn
    assert "finished" in drawn and "<canvas" in drawn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "{}/none"], "is no log folder of a run"),
        (["report", "{}", "--samples", "-1"], "must not be negative"),
        (["report", "{}", "--output", "{}/no/folder.html"], "cannot be written"),
        (["watch", "{}", "--port", "99999"], "Cannot listen"),
    ],
)
def test_mistakes_are_one_message(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    assert main([argument.format(tmp_path) for argument in arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_next_free_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with listener("127.0.0.1", port) as second:
            assert port < second.getsockname()[1] < port + 20


@pytest.mark.asyncio
async def test_the_server_tells_news_to_those_who_know_its_key(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=2)
    server = RunServer(find_run(tmp_path))
    application = server.application()
    transport = httpx.ASGITransport(application)
    async with (
        application.router.lifespan_context(application),
        httpx.AsyncClient(transport=transport, base_url="http://run") as client,
    ):
        for path in ("/", "/wrong/", "/wrong/news", "/wrong/samples", f"/{server.key[:-1]}/samples/0", "/samples/0"):
            assert (await client.get(path)).status_code == 404
        news = (await client.get(f"/{server.key}/news?after=0")).json()
        assert news["run"]["curves"]["train/reward"]["steps"] == [1, 2]
        page = (await client.get(f"/{server.key}/")).text
        assert data_of(page)["live"] is True and "connect-src 'self'" in page
        waiting = asyncio.create_task(client.get(f"/{server.key}/news?after={news['version']}"))
        started = time.monotonic()
        add_step(run, 3, {"reward": 1.0}, "new")
        later = (await waiting).json()
        assert time.monotonic() - started < 10 and later["version"] > news["version"]
        assert later["run"]["curves"]["train/reward"]["steps"] == [1, 2, 3]
        samples = (await client.get(f"/{server.key}/samples?step_from=2&limit=3&offset=4")).json()
        assert (len(samples["rows"]), samples["total"], samples["known"]) == (3, 8, 12)
        assert (await client.get(f"/{server.key}/samples?limit=5000")).status_code == 400
        detail = (await client.get(f"/{server.key}/samples/12")).json()
        assert detail["messages"][1]["content"] == "new"
        for number in ("13", "0", "-1", "x"):
            assert (await client.get(f"/{server.key}/samples/{number}")).status_code == 404
