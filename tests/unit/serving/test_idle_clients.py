"""A client that is silent for ten minutes loses nothing: its model waits on the disk, and comes back with its bits."""

import time
from types import SimpleNamespace

import pytest
from fake_models import FakeModels
from running import Raw, config_in, service

from nemo_rl.serving import limits
from nemo_rl.serving import service as program

ROWS = [[1, 2, 3, 4], [5, 6, 7]]


class Clock:
    """The time of the service, which tests move."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self.module = SimpleNamespace(
            monotonic=lambda: time.monotonic() + self.ahead, time=lambda: time.time() + self.ahead
        )


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(program, "time", made.module)
    monkeypatch.setattr(limits, "time", made.module)
    monkeypatch.setattr(program, "_SWEEP_S", 0.05)
    return made


def step(client: Raw, model: str, seq_id: int) -> list[bytes]:
    passed = client.submit_pass(model, seq_id, ROWS)["request_id"]
    updated = client.ok("optim_step", model_id=model, seq_id=seq_id + 1, adam_params={"learning_rate": 0.1})
    return [client.retrieve(passed).content, client.retrieve(updated["request_id"]).content]


def test_a_model_is_parked_after_ten_minutes_and_continues_with_its_bits(clock, tmp_path):
    with service(FakeModels(), config_in(tmp_path / "calm")) as url:
        client = Raw(url)
        model = client.model(client.session())
        expected = [step(client, model, 1), step(client, model, 3)]
    models = FakeModels()
    with service(models, config_in(tmp_path / "silent")) as url:
        client = Raw(url)
        session = client.session()
        model = client.model(session)
        first = step(client, model, 1)
        clock.ahead = 590.0
        time.sleep(0.3)
        assert models.adapters, "ten minutes are not over"
        clock.ahead = 610.0
        end = time.monotonic() + 10
        while models.adapters and time.monotonic() < end:
            time.sleep(0.02)
        assert not models.adapters, "the model is on the disk"
        client.ok("session_heartbeat", session_id=session)
        assert [first, step(client, model, 3)] == expected
    assert [what for what, _ in models.calls if what in ("backward", "update")] == ["backward", "update"] * 2


def test_models_of_silent_clients_do_not_count(clock, tmp_path):
    with service(FakeModels(), config_in(tmp_path, max_models_per_key=1)) as url:
        client = Raw(url)
        client.model(client.session())
        other = client.session()
        lora = {"session_id": other, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
        assert "max_models_per_key" in client.error(client.ok("create_model", **lora)["request_id"])
        clock.ahead = 610.0
        assert client.result(client.ok("create_model", **lora)["request_id"])["model_id"] == f"{other}:train:0"
