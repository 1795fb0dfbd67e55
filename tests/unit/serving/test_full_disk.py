"""A full disk: requests are refused with folder and bytes, nothing that was accepted is lost, and work goes on."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_models import FakeModels
from running import Raw, config_in, pass_body, service
from small_disk import fill, small_disk
from test_restart import ROWS, normal, play

PAGE = 4096
STEP = {"adam_params": {"learning_rate": 0.1}}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "disk").mkdir()
    with small_disk(tmp_path / "disk", "2m") as disk:
        yield disk


def requests(model: str) -> list[tuple[str, Any]]:
    return [
        ("forward_backward", pass_body(model, 1, ROWS)),
        ("optim_step", {"model_id": model, "seq_id": 2, **STEP}),
        ("forward_backward", pass_body(model, 3, ROWS)),
        ("optim_step", {"model_id": model, "seq_id": 4, **STEP}),
        ("forward_backward", pass_body(model, 5, ROWS, forward_only=True)),
    ]


@pytest.fixture
def calm(tmp_path: Path) -> list[bytes]:
    """Results with room on the disk."""
    with service(FakeModels(vocab=512), config_in(tmp_path / "calm")) as url:
        client = Raw(url)
        session = client.session()
        return normal(play(client, requests(client.model(session))), session)


def send(client: Raw, path: str, body: Any) -> Any:
    how = {"content": body} if isinstance(body, bytes) else {"json": body}
    return client.http.post(f"/api/v1/{path}", **how)


def paused(client: Raw, request_id: str) -> str:
    """Wait until a request waits for space, and return what its client reads."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        answer = client.post("retrieve_future", request_id=request_id)
        assert answer.status_code == 408, answer.text
        if answer.json()["queue_state"] == "paused_capacity":
            return str(answer.json()["queue_state_reason"])
    raise AssertionError("the request does not wait for space")


def test_a_request_that_cannot_be_stored_is_refused_until_there_is_room(disk, calm):
    models = FakeModels(vocab=512)
    with service(models, config_in(disk / "state")) as url:
        client = Raw(url)
        session = client.session()
        model = client.model(session)
        todo = requests(model)
        found = play(client, todo[:2])
        filling = fill(disk, leave_bytes=0)
        refused = send(client, *todo[2])
        assert refused.status_code == 507, refused.text
        text = refused.json()["error"]
        folder = disk / "state/models" / model.replace(":", "-") / "bodies"
        assert text.startswith(f"The service cannot write to {folder}: No space left on device (")
        assert f"({len(todo[2][1])} bytes are needed and 0 bytes are free). Free space there." in text
        assert refused.json()["category"] == "server"
        assert client.post("create_session", tags=[], sdk_version="0").status_code == 507
        assert client.get("healthz") == {"status": "ok"}
        assert play(client, todo[:2]) == found, "results are there still"
        filling.unlink()
        found += play(client, todo[2:])
    assert normal(found, session) == calm
    assert [what for what, _ in models.calls if what in ("create", "load")] == ["create"]


def test_a_result_that_cannot_be_stored_is_kept_until_there_is_room(disk, calm):
    models = FakeModels(vocab=512)
    with service(models, config_in(disk / "state", poll_hold_s=0.2)) as url:
        client = Raw(url)
        session = client.session()
        model = client.model(session)
        todo = requests(model)
        found = play(client, todo[:2])
        models.on_call = lambda what: fill(disk, leave_bytes=0)
        made = send(client, *todo[2]).json()["request_id"]
        assert "results: No space left on device" in paused(client, made)
        models.on_call = lambda what: None
        (disk / "fill").unlink()
        found += play(client, todo[2:])
        assert [what for what, _ in models.calls].count("backward") == 2, "it is executed once"
    assert normal(found, session) == calm


def test_a_service_that_ends_with_a_full_disk_continues(disk, calm):
    models = FakeModels(vocab=512)
    with service(models, config_in(disk / "state", poll_hold_s=0.2)) as url:
        client = Raw(url)
        session = client.session()
        model = client.model(session)
        todo = requests(model)
        found = play(client, todo[:3])
        models.on_call = lambda what: fill(disk, leave_bytes=0)
        paused(client, send(client, *todo[3]).json()["request_id"])
    with service(FakeModels(vocab=512), config_in(disk / "state", poll_hold_s=0.2)) as url:
        client = Raw(url)
        assert client.post("retrieve_future", request_id=f"{model}:4").status_code == 408
        (disk / "fill").unlink()
        found += play(client, todo[3:])
    assert normal(found, session) == calm


def test_weights_that_cannot_be_saved_fail_their_request_only(disk, calm):
    """There is room for requests and results, and none for an adapter."""
    models = FakeModels(vocab=512)
    with service(models, config_in(disk / "state", state_every=1)) as url:
        client = Raw(url)
        session = client.session()
        model = client.model(session)
        todo = requests(model)
        found = play(client, todo[:1])
        filling = fill(disk, leave_bytes=8 * PAGE)
        found += play(client, todo[1:2])  # its state cannot be stored, which is tried again after the next update
        saves = [
            ("save_weights", {"model_id": model, "seq_id": 3, "path": "one"}),
            ("save_weights_for_sampler", {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 0}),
        ]
        for failed in map(json.loads, play(client, saves)):
            assert failed["category"] == "server"
            assert failed["error"].startswith(f"The adapter is not saved: {disk / 'state'}"), failed
        assert models.samplers == {}
        filling.unlink()
        state = disk / "state/models" / model.replace(":", "-") / "state.json"
        assert not state.exists()
        found += play(client, [("forward_backward", pass_body(model, 5, ROWS))])
        found += play(client, [("optim_step", {"model_id": model, "seq_id": 6, **STEP})])
        assert json.loads(state.read_text())["seq"] == 6
        saved = play(client, [("save_weights", {"model_id": model, "seq_id": 7, "path": "one"})])
        assert b"tinker://" in saved[0]
        found += play(client, [("forward_backward", pass_body(model, 8, ROWS, forward_only=True))])
        assert [what for what, _ in models.calls if what in ("create", "load")] == ["create"]
    assert normal(found, session) == calm


def test_a_load_that_cannot_be_stored_leaves_the_model_as_it_was(disk):
    models = FakeModels(vocab=512)
    with service(models, config_in(disk / "state")) as url:
        client = Raw(url)
        model = client.model(client.session())
        path = f"tinker://{model}/weights/new"
        play(client, [("save_weights", {"model_id": model, "seq_id": 1, "path": "new"})])
        play(
            client, [("forward_backward", pass_body(model, 2, ROWS)), ("optim_step", {"model_id": model, "seq_id": 3})]
        )
        before = play(client, [("forward_backward", pass_body(model, 4, ROWS, forward_only=True))])
        filling = fill(disk, leave_bytes=8 * PAGE)
        load = {"model_id": model, "path": path, "optimizer": True}
        (failed,) = play(client, [("load_weights", {**load, "seq_id": 5})])
        assert b"The adapter is not saved" in failed
        assert len(models.adapters) == 1
        filling.unlink()
        assert play(client, [("forward_backward", pass_body(model, 6, ROWS, forward_only=True))]) == before
        assert b"error" not in play(client, [("load_weights", {**load, "seq_id": 7})])[0]
        after = play(client, [("forward_backward", pass_body(model, 8, ROWS, forward_only=True))])
        assert after != before


def test_a_model_that_needs_the_memory_of_another_gets_it_on_a_full_disk(disk):
    models = FakeModels(vocab=512)
    with service(models, config_in(disk / "state", max_resident_models=1)) as url:
        client = Raw(url)
        session = client.session()
        first = client.model(session, 0)
        play(client, requests(first)[:2])
        filling = fill(disk, leave_bytes=10 * PAGE)
        second = client.model(session, 1)
        filling.unlink()
        play(client, requests(second)[:2])
        play(client, requests(first)[2:])
        assert len(models.adapters) == 1


class Gated(FakeModels):
    """Updates wait for a gate, and a state finds room on the disk."""

    def __init__(self, filling: Path) -> None:
        super().__init__(vocab=512)
        self.gate, self.filling = threading.Event(), filling

    async def _work(self, what: str, name: str) -> None:
        await super()._work(what, name)
        while what == "update" and not self.gate.is_set():
            await asyncio.sleep(0.01)
        if what == "save":
            self.filling.unlink(missing_ok=True)


def test_an_update_without_a_stored_result_is_in_no_stored_state(disk, calm):
    """Another model needs the memory meanwhile, so the update is executed again, and counts once."""
    models = Gated(disk / "fill")
    with service(models, config_in(disk / "state", max_resident_models=1, poll_hold_s=0.2)) as url:
        client = Raw(url)
        session = client.session()
        first, second = client.model(session, 0), client.model(session, 1)
        todo = requests(first)
        found = play(client, todo[:1])
        made = send(client, *todo[1]).json()["request_id"]
        client.submit_pass(second, 1, ROWS)
        fill(disk, leave_bytes=0)
        models.gate.set()
        paused(client, made)
        while ("backward", f"{second}@4") not in models.calls:
            time.sleep(0.05)
        models.filling.unlink(missing_ok=True)
        found += play(client, todo[1:])
    assert normal(found, session) == calm


def test_samples_are_refused_until_there_is_room(disk):
    with service(FakeModels(vocab=512), config_in(disk / "state")) as url:
        client = Raw(url)
        session = client.session()
        made = client.ok("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="tiny")
        body = {
            "sampling_session_id": made["sampling_session_id"],
            "seq_id": 1,
            "prompt": {"chunks": [{"tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": 4, "stop": [], "seed": 1},
        }
        filling = fill(disk, leave_bytes=0)
        refused = client.post("asample", **body)
        assert refused.status_code == 507 and "No space left on device" in refused.json()["error"]
        filling.unlink()
        assert len(client.samples(client.ok("asample", **body)["request_id"])[0]) == 4
