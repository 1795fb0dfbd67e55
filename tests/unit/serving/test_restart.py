"""A service that was killed at any moment continues, and its clients get what they get without the kill."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_models import FakeModels
from running import Raw, config_in, pass_body, service

from nemo_rl.serving import state
from nemo_rl.serving.store.journal import Journal
from nemo_rl.utils.errors import ConfigError

ROWS = [[1, 2, 3, 4], [5, 6, 7]]
HERE = Path(__file__).parent


def script(model: str, session: str) -> list[tuple[str, Any]]:
    """Requests of a client: passes, updates, saves, a load, samplers without and with a name."""
    step = {"adam_params": {"learning_rate": 0.1}}
    session_body = {"session_id": session, "base_model": "tiny"}
    prompt = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 6, "stop": []}}
    path = f"tinker://{model}/weights/mid"
    return [
        ("create_model", {**session_body, "model_seq_id": 0, "lora_config": {"rank": 2, "seed": 4}}),
        ("forward_backward", pass_body(model, 1, ROWS)),
        ("optim_step", {"model_id": model, "seq_id": 2, **step}),
        ("forward_backward", pass_body(model, 3, ROWS[:1])),
        ("forward_backward", pass_body(model, 4, ROWS[1:])),
        ("save_weights", {"model_id": model, "seq_id": 5, "path": "mid"}),
        ("optim_step", {"model_id": model, "seq_id": 6, **step}),
        ("save_weights_for_sampler", {"model_id": model, "seq_id": 7, "sampling_session_seq_id": 0}),
        ("asample", {"sampling_session_id": f"{session}:sample:0", "seq_id": 1, "num_samples": 3, **prompt}),
        ("forward_backward", pass_body(model, 8, [[1, 99]])),  # an error of the user
        ("forward_backward", pass_body(model, 9, ROWS)),
        ("optim_step", {"model_id": model, "seq_id": 10, **step}),
        ("save_weights_for_sampler", {"model_id": model, "seq_id": 11, "path": "end"}),
        ("load_weights", {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}),
        ("forward_backward", pass_body(f"{session}:train:1", 1, ROWS)),
        ("optim_step", {"model_id": f"{session}:train:1", "seq_id": 2, **step}),
        ("load_weights", {"model_id": model, "seq_id": 12, "path": path, "optimizer": False}),
        ("forward_backward", pass_body(model, 13, ROWS)),
        ("optim_step", {"model_id": model, "seq_id": 14, **step}),
        ("forward_backward", pass_body(model, 15, ROWS, forward_only=True)),
    ]


def play(client: Raw, requests: list[tuple[str, Any]], patience_s: float = 0.0) -> list[bytes]:
    """Send all requests and return all results. With patience, connections that are lost are tried again."""

    def call(path: str, body: Any) -> httpx.Response:
        end = time.monotonic() + patience_s
        while True:
            try:
                how = {"content": body} if isinstance(body, bytes) else {"json": body}
                return client.http.post(f"/api/v1/{path}", **how)
            except httpx.TransportError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    results = []
    for path, body in requests:
        while True:
            made = call(path, body)
            assert made.status_code == 200, made.text
            while (answer := call("retrieve_future", {"request_id": made.json()["request_id"]})).status_code == 408:
                pass
            if answer.status_code != 410:
                break
        assert answer.status_code == 200, answer.text
        results.append(answer.content)
    return results


def normal(results: list[bytes], session: str) -> list[bytes]:
    return [each.replace(session.encode(), b"SESSION") for each in results]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """The results without a kill, and the folder of the state at each moment of the run."""
    folder = tmp_path_factory.mktemp("restart")
    models, copies = FakeModels(), []
    folder_of_state = folder / "state"

    def copy(what: str) -> None:
        target = folder / f"image-{len(copies)}"
        shutil.copytree(folder_of_state, target)
        copies.append((what, target))

    with service(models, config_in(folder_of_state, state_every=2)) as url:
        client = Raw(url)
        session = client.session()
        requests = script(f"{session}:train:0", session)
        models.on_call = copy
        results = play(client, requests)
        models.on_call = lambda what: None
        copy("end")
    assert len(copies) > 20
    return session, requests, results, copies


def test_each_moment_of_a_run_can_be_the_last(images):
    session, requests, results, copies = images
    for what, folder in copies:
        models = FakeModels()
        with service(models, config_in(folder, state_every=2)) as url:
            found = play(Raw(url), requests)
        assert found == results, what


def test_a_torn_line_at_the_end_does_not_count(images):
    session, requests, results, copies = images
    what, image = copies[-1]
    folder = image.parent / "torn"
    shutil.copytree(image, folder)
    for journal in folder.rglob("*.jsonl"):
        with journal.open("ab") as file:
            file.write(b'{"seq": 99, "ki')
    with service(FakeModels(), config_in(folder)) as url:
        assert play(Raw(url), requests) == results


def test_what_was_queued_runs_without_its_client(tmp_path):
    """Commands that were accepted before the kill are executed after the start, even if the client does not ask."""
    models = FakeModels()
    with service(models, config_in(tmp_path / "state")) as url:
        client = Raw(url)
        model = client.model(client.session())
        client.submit_pass(model, 2, ROWS)
        client.submit_pass(model, 3, ROWS)
        started, hold = threading.Event(), threading.Event()
        models.on_call = lambda what: (started.set(), hold.wait(10))
        threading.Thread(target=client.submit_pass, args=(model, 1, ROWS), daemon=True).start()
        assert started.wait(10)
        shutil.copytree(tmp_path / "state", tmp_path / "image")
        hold.set()
    again = FakeModels()
    with service(again, config_in(tmp_path / "image")) as url:
        end = time.monotonic() + 10
        while [what for what, _ in again.calls].count("backward") < 3 and time.monotonic() < end:
            time.sleep(0.02)
    assert [what for what, _ in again.calls] == ["create", "backward", "backward", "backward"]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Killed:
    """A process that is killed and started again."""

    def __init__(self, folder: Path, delay_s: float) -> None:
        self.port, self.folder, self.delay_s = free_port(), folder, delay_s
        self.start()

    def start(self) -> None:
        command = [sys.executable, str(HERE / "serve_fake.py"), str(self.port), str(self.folder), str(self.delay_s)]
        path = os.pathsep.join([str(HERE), str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("Serving on")

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(20)


def test_a_killed_process(tmp_path):
    with service(FakeModels(), config_in(tmp_path / "alone")) as url:
        client = Raw(url)
        session = client.session()
        expected = normal(play(client, script(f"{session}:train:0", session)), session)
    server = Killed(tmp_path / "killed", 0.05)
    found: list[list[bytes]] = []
    try:
        client = Raw(f"http://127.0.0.1:{server.port}")
        session = client.session()
        client.http.timeout = httpx.Timeout(60)
        work: Callable[[], None] = lambda: found.append(  # noqa: E731
            play(client, script(f"{session}:train:0", session), 60)
        )
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        rng = random.Random(0)
        for _ in range(2):
            thread.join(rng.uniform(0.1, 0.6))
            server.kill()
            server.start()
        thread.join(60)
        assert not thread.is_alive()
        assert normal(found[0], session)[:8] == expected[:8]
        samples = [index for index, (path, _) in enumerate(script("m", "s")) if path == "asample"]
        for index, (one, other) in enumerate(zip(normal(found[0], session), expected, strict=True)):
            # Draws without a seed depend on the sampling session, whose id differs between two runs.
            assert index in samples or one == other, index
    finally:
        server.kill()


def test_two_services_do_not_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "LOCK_S", 0.3)
    with subprocess.Popen(
        [sys.executable, "-c", _LOCK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match="is used by another service"):
            state.ServiceState(tmp_path, 60.0)
        other.communicate("end")
    state.ServiceState(tmp_path, 60.0).release()


_LOCK = """
import sys
from pathlib import Path
from nemo_rl.files.folders import FolderLock
lock = FolderLock(Path(sys.argv[1]))
assert lock.acquire()
print("locked", flush=True)
sys.stdin.read()
"""


def test_journals(tmp_path):
    journal = Journal(tmp_path / "log")
    assert journal.read() == []
    for number in range(3):
        journal.append({"number": number, "text": "\n\u2028"})
    with journal.path.open("ab") as file:
        file.write(b'{"number": 3')
    assert [record["number"] for record in journal.read()] == [0, 1, 2]
    journal.append({"number": 4})
    assert [record["number"] for record in journal.read()] == [0, 1, 2, 4]
    journal.path.write_bytes(b'{"a": 1}\nx\n{"b": 2}\n')
    with pytest.raises(Exception, match="line 2, is damaged"):
        journal.read()


def test_lost_answers_and_repeated_submissions(tmp_path):
    """Each request is sent up to four times and each answer is lost up to three times; nothing runs twice."""
    models = FakeModels()
    rng = random.Random(1)
    with service(models, config_in(tmp_path)) as url:
        client = Raw(url)
        session = client.session()
        model = client.model(session)
        requests = script(model, session)[1:5]
        shuffled = [each for each in requests for _ in range(rng.randint(2, 4))]
        rng.shuffle(shuffled)

        def send(path: str, body: Any) -> None:
            how = {"content": body} if isinstance(body, bytes) else {"json": body}
            with (
                httpx.Client(base_url=url, headers={"x-api-key": "tml-test"}) as lossy,
                contextlib.suppress(httpx.TimeoutException),
            ):
                lossy.post(f"/api/v1/{path}", **how, timeout=rng.choice([0.001, 5]))

        threads = [threading.Thread(target=send, args=each) for each in shuffled]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        for path, body in requests:
            how = {"content": body} if isinstance(body, bytes) else {"json": body}
            made = client.http.post(f"/api/v1/{path}", **how).json()["request_id"]
            answers = {client.retrieve(made).content for _ in range(3)}
            assert len(answers) == 1
        ran = [what for what, _ in models.calls if what in ("backward", "update")]
        assert ran == ["backward", "update", "backward", "backward"]


def test_results_stay_after_their_delivery(tmp_path):
    with service(FakeModels(), config_in(tmp_path, keep_results_s=600)) as url:
        client = Raw(url)
        model = client.model(client.session())
        request = client.submit_pass(model, 1, ROWS)["request_id"]
        first = client.retrieve(request).content
    with service(FakeModels(), config_in(tmp_path)) as url:
        assert Raw(url).retrieve(request).content == first
        values, metrics = Raw(url).output(request)
        assert np.isfinite(np.concatenate(values)).all()
        assert metrics["loss:sum"] > 0
