"""Malformed and hostile requests get an answer that says what is wrong, and harm nothing."""

import json
import os
import re
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest
from fake_models import FakeModels
from running import Raw, config_in, pass_body, pass_message, service

from nemo_rl.config.schema.service import ServiceConfig
from nemo_rl.serving.store.keys import KeyBook
from nemo_rl.utils.errors import ConfigError


@dataclass
class Target:
    client: Raw
    other: Raw
    session: str
    model: str
    sampler: str
    url: str
    folder: Any
    models: FakeModels
    number: int = field(default=0)

    def next_seq(self) -> int:
        self.number += 1
        return self.number


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder, models = tmp_path_factory.mktemp("hostile") / "state", FakeModels()
    with service(models, config_in(folder, max_request_mb=1, max_models_per_key=3)) as url:
        client, other = Raw(url), Raw(url, "tml-other")
        session = client.session()
        model = client.model(session)
        sampler = client.ok(
            "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="tiny"
        )["sampling_session_id"]
        yield Target(client, other, session, model, sampler, url, folder, models)
        rows = [[1, 2, 3]]  # the service still works, and the model goes on
        assert client.output(client.submit_pass(model, target_of(model, client), rows)["request_id"])[1]


def target_of(model: str, client: Raw) -> int:
    """The number of the next request."""
    message = client.error(client.submit_pass(model, 2**30, [[1, 2]])["request_id"])
    return int(message.split()[-1].rstrip("."))


def changed(change: Any, **more: Any) -> Any:
    def message_of(target: Target) -> bytes:
        message = pass_message(target.model, target.next_seq(), [[1, 2, 3]], **more)
        change(message)
        return message.SerializeToString()

    return message_of


def nan(message: Any) -> None:
    message.data[0].loss_fn_inputs["weights"].dense = np.array([np.nan, 1], "<f4").tobytes()


def tokens(values: list[int]) -> Any:
    def change(message: Any) -> None:
        message.data[0].model_input[0].encoded_text.tokens = np.array(values, "<i4").tobytes()

    return change


PASSES = {
    "NaN in the data": (changed(nan), r"data\[0\].weights has a value that is NaN"),
    "unknown loss": (changed(lambda message: None, loss="nll"), "There is no loss 'nll'"),
    "stable_reinforce": (changed(lambda message: None, loss="stable_reinforce"), "stable_reinforce is not published"),
    "custom": (changed(lambda message: None, loss="custom"), "Losses do not run in this service"),
    "no data": (changed(lambda message: message.ClearField("data")), "data is empty"),
    "no tokens": (changed(lambda message: message.data[0].ClearField("model_input")), "has no token"),
    "image": (changed(lambda message: message.data[0].model_input.add().image.SetInParent()), "has an image"),
    "audio": (changed(lambda message: message.data[0].model_input.add().dmel.SetInParent()), "has audio"),
    "empty chunk": (changed(lambda message: message.data[0].model_input.add()), "has nothing"),
    "unknown token": (changed(tokens([1, 99])), "a token outside 0..31"),
    "negative token": (changed(tokens([1, -1])), "a token outside 0..31"),
    "too long": (changed(tokens([1] * 65)), "has 65 tokens; the model reads at most 64"),
    "other length": (changed(tokens([1, 2, 3])), "must have the same shape"),
    "missing input": (changed(lambda message: message.data[0].loss_fn_inputs.pop("weights")), "lacks weights"),
    "unknown input": (
        changed(lambda message: message.data[0].loss_fn_inputs["extra"].SetInParent()),
        "unknown input 'extra'",
    ),
    "unknown target": (
        changed(
            lambda message: setattr(
                message.data[0].loss_fn_inputs["target_tokens"], "dense", np.array([1, 32], "<i8").tobytes()
            )
        ),
        "target_tokens has an id outside",
    ),
    "unknown setting": (changed(lambda message: message.loss_fn_config.update({"beta": 1.0})), "no setting 'beta'"),
    "infinite setting": (
        changed(lambda message: message.loss_fn_config.update({"clip_low_threshold": float("inf")}), loss="ppo"),
        "must be finite",
    ),
    "text as setting": (
        changed(lambda message: setattr(message.loss_fn_config_v2["clip_low_threshold"], "text", "x"), loss="ppo"),
        "it must be a number",
    ),
    "huge sparse tensor": (
        changed(lambda message: message.data[0].loss_fn_inputs["weights"].shape.extend([2**20, 2**20])),
        "cells",
    ),
}


@pytest.mark.parametrize("case", PASSES)
def test_passes(target, case):
    body, text = PASSES[case]
    answer = target.client.http.post("/api/v1/forward_backward", content=body(target))
    assert answer.status_code == 200, answer.text
    error = target.client.error(answer.json()["request_id"])
    assert re.search(text, error), error


COMMANDS = {
    "negative rate": ("optim_step", {"adam_params": {"learning_rate": -1}}, "learning_rate"),
    "beta of 1": ("optim_step", {"adam_params": {"beta1": 1}}, "beta1"),
    "other optimizer": ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "'dimuon' is not served"),
    "text as rate": ("optim_step", {"adam_params": {"learning_rate": "1"}}, "learning_rate"),
    "name with a slash": ("save_weights", {"path": "../../etc/passwd"}, "cannot be used"),
    "empty name": ("save_weights", {"path": ""}, "cannot be used"),
    "long name": ("save_weights", {"path": "x" * 200}, "cannot be used"),
    "short time": ("save_weights", {"path": "a", "ttl_seconds": 5}, "ttl_seconds"),
    "encrypted archive": ("save_weights_external", {"path": "a", "age_encryption_recipients": ["age1x"]}, "age_"),
    "unknown kind": ("save_weights_for_sampler", {"path": "a", "kind": "other"}, "kind"),
    "unknown checkpoint": ("load_weights", {"path": "tinker://x/weights/y", "optimizer": False}, "no checkpoint"),
    "no checkpoint": ("load_weights", {"path": "file:///etc/passwd", "optimizer": False}, "no path of a checkpoint"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_commands(target, case):
    path, body, text = COMMANDS[case]
    made = target.client.ok(path, model_id=target.model, seq_id=target.next_seq(), **body)
    assert text in target.client.error(made["request_id"])


SAMPLES = {
    "image": ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "has an image"),
    "no list": ({"prompt": {"chunks": [{"tokens": "abc"}]}}, "no list of token ids"),
    "no prompt": ({"prompt": {"chunks": []}}, "prompt has no token"),
    "text as token": ({"prompt": {"chunks": [{"tokens": [1, "2"]}]}}, "no list of token ids"),
    "huge token": ({"prompt": {"chunks": [{"tokens": [2**70]}]}}, "no list of token ids"),
    "too long": ({"prompt": {"chunks": [{"tokens": [1] * 65}]}}, "at most 64"),
    "no room": ({"prompt": {"chunks": [{"tokens": [1] * 64}]}}, "no room"),
    "negative temperature": ({"sampling_params": {"temperature": -1.0}}, "temperature"),
    "top_k of 0": ({"sampling_params": {"top_k": 0}}, "top_k is 0"),
    "top_p of 0": ({"sampling_params": {"top_p": 0.0}}, "top_p"),
    "no samples": ({"num_samples": 0}, "num_samples"),
    "many samples": ({"num_samples": 10**6}, "num_samples"),
    "unknown stop": ({"sampling_params": {"stop": [99]}}, "stop has an id outside"),
    "empty stop": ({"sampling_params": {"stop": [""]}}, "stop has an empty text"),
    "many likely tokens": ({"topk_prompt_logprobs": 10**6}, "topk_prompt_logprobs"),
    "alternatives": ({"prompt_alt_tokens_k": 3}, "prompt_alt_tokens_k is not served"),
    "last without scores": ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
    "targets of another shape": (
        {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}},
        "must be [2, K]",
    ),
    "huge targets": (
        {
            "target_prompt_logprobs": {
                "data": [],
                "dtype": "int64",
                "shape": [2, 2**40],
                "sparse_crow_indices": [0, 0, 0],
            }
        },
        "must be [2, K]",
    ),
    "unknown target": (
        {"target_prompt_logprobs": {"data": [1, 99], "dtype": "int64", "shape": [2, 1]}},
        "outside -1..31",
    ),
}


@pytest.mark.parametrize("case", SAMPLES)
def test_samples(target, case):
    body, text = SAMPLES[case]
    whole = {"prompt": {"chunks": [{"tokens": [1, 2, 3]}]}, "sampling_params": {"max_tokens": 2}, **body}
    seq_id = list(SAMPLES).index(case) + 1
    made = target.client.ok("asample", sampling_session_id=target.sampler, seq_id=seq_id, **whole)
    assert text in target.client.error(made["request_id"])


RAW = {
    "no JSON": ("create_session", b"{", 400, "no valid JSON"),
    "a list": ("create_session", b"[]", 400, "must be an object"),
    "NaN": ("create_session", b'{"tags": NaN}', 400, "NaN"),
    "deep": ("create_session", b"[" * 100_000, 400, "no valid JSON"),
    "wrong type": ("create_session", b'{"tags": 1}', 400, "tags"),
    "no protobuf": ("forward_backward", b"\xff\xff\xff", 400, "no valid protobuf"),
    "empty protobuf": ("forward_backward", b"", 404, "no model"),
    "no zstd": ("forward_backward", b"abc", 400, "no valid zstd"),
    "too large": ("create_session", b'"' + b"x" * 2**20 + b'"', 413, "larger than"),
    "no number": ("optim_step", b'{"model_id": "MODEL"}', 400, "seq_id"),
    "number 0": ("optim_step", b'{"model_id": "MODEL", "seq_id": 0}', 400, "seq_id"),
    "true as number": ("optim_step", b'{"model_id": "MODEL", "seq_id": true}', 400, "seq_id"),
    "unknown model": ("optim_step", b'{"model_id": "../../etc", "seq_id": 1}', 404, "no model"),
    "no model": ("optim_step", b'{"model_id": 5, "seq_id": 1}', 400, "model_id"),
    "unknown session": ("session_heartbeat", b'{"session_id": "x"}', 404, "no session"),
    "unknown request": ("retrieve_future", b'{"request_id": "x"}', 404, "no request"),
    "lost request": ("retrieve_future", b'{"request_id": "MODEL:77777"}', 410, "not kept"),
    "huge number": ("retrieve_future", b'{"request_id": "MODEL:' + b"9" * 100 + b'"}', 404, "no request"),
    "sample without session": ("asample", b'{"seq_id": 1}', 400, "sampling_session_id"),
    "copies": ("copy_weights", b"{}", 403, "does not serve"),
    "accounts": ("auth/token", b"{}", 403, "does not serve"),
    "losses": ("create_custom_loss", b"{}", 403, "forward_backward_custom"),
}


@pytest.mark.parametrize("case", RAW)
def test_raw_bodies(target, case):
    path, body, status, text = RAW[case]
    headers = {"content-encoding": "zstd"} if case == "no zstd" else {}
    content = body.replace(b"MODEL", target.model.encode())
    answer = target.client.http.post(f"/api/v1/{path}", content=content, headers=headers)
    assert answer.status_code == status, answer.text
    assert text in answer.json()["error"]


def test_a_compressed_body_may_not_be_large(target):
    pyarrow = pytest.importorskip("pyarrow")
    small = pyarrow.compress(b"x" * 2**24, codec="zstd", asbytes=True)
    assert len(small) < 2**14
    answer = target.client.http.post("/api/v1/forward_backward", content=small, headers={"content-encoding": "zstd"})
    assert answer.status_code == 413


def test_a_compressed_body_is_read(target):
    pyarrow = pytest.importorskip("pyarrow")
    content = pass_message(target.model, target.next_seq(), [[1, 2, 3]]).SerializeToString()
    small = pyarrow.compress(content, codec="zstd", asbytes=True)
    answer = target.client.http.post("/api/v1/forward_backward", content=small, headers={"content-encoding": "zstd"})
    assert target.client.output(answer.json()["request_id"])[1]["loss:sum"] > 0


def test_other_users_see_nothing(target):
    mine, other = target.client, target.other
    name = f"{target.model}:1"
    for path, body in (
        ("optim_step", {"model_id": target.model, "seq_id": 1}),
        ("get_info", {"model_id": target.model}),
        ("retrieve_future", {"request_id": name}),
        ("session_heartbeat", {"session_id": target.session}),
        (f"sessions/{target.session}/finish", {}),
        ("create_sampling_session", {"session_id": target.session, "sampling_session_seq_id": 9, "base_model": "tiny"}),
        ("asample", {"sampling_session_id": target.sampler, "seq_id": 1}),
    ):
        assert other.post(path, **body).status_code == 403, path
    for path in (f"training_runs/{target.model}", f"sessions/{target.session}", f"samplers/{target.sampler}"):
        assert other.http.get(f"/api/v1/{path}").status_code == 403, path
    assert other.get("training_runs")["training_runs"] == []
    assert len(mine.get("training_runs")["training_runs"]) == 1


@pytest.mark.parametrize("key", ["", "sk-x", "tml-", "tml-\xe9", "tml-" + "x" * 600, "tml-a b"])
def test_keys_of_another_form_are_refused(target, key):
    answer = httpx.post(f"{target.url}/api/v1/create_session", json={}, headers={"x-api-key": key.encode("latin-1")})
    assert answer.status_code == 401


def test_limits_of_a_user(target):
    client, other = Raw(target.url, "tml-greedy"), Raw(target.url, "tml-modest")
    session = client.session()
    for number in range(3):
        client.model(session, number)
    assert [run["lora_rank"] for run in client.get("training_runs")["training_runs"]] == [4, 4, 4]
    body = {"session_id": session, "model_seq_id": 3, "base_model": "tiny"}
    assert "max_models_per_key" in client.error(client.ok("create_model", **body)["request_id"])
    large = {**body, "lora_config": {"rank": 1000}}
    assert "The rank 1000 is not allowed" in client.error(client.ok("create_model", **large)["request_id"])
    unknown = {**body, "base_model": "meta/x"}
    assert "There is no base model 'meta/x'" in client.error(client.ok("create_model", **unknown)["request_id"])
    frozen = {"rank": 1, "train_attn": False, "train_mlp": False, "train_unembed": False}
    made = other.ok("create_model", **{**body, "session_id": other.session(), "lora_config": frozen})
    assert "all false" in other.error(made["request_id"])


def test_a_full_queue_is_answered_with_429(tmp_path):
    models = FakeModels()
    with service(models, config_in(tmp_path, max_queued_mb=1)) as url:
        client = Raw(url)
        model = client.model(client.session())
        rows = [[1] * 60 for _ in range(700)]
        assert client.submit_pass(model, 2, rows)["request_id"]  # waits for the first one
        answer = client.http.post("/api/v1/forward_backward", content=pass_body(model, 3, rows))
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"


def test_a_file_with_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# users\ntml-secret alice\ntml-more alice\n\ntml-third bob\n")
    keys = KeyBook(file)
    assert [keys.user_of(key) for key in ("tml-secret", "tml-more", "tml-third", "tml-x")] == [
        "alice",
        "alice",
        "bob",
        None,
    ]
    for text, problem in (("", "has no key"), ("sk-x alice", "line 1"), ("tml-x", "line 1"), ("tml-x a\ntml-x b", "2")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            KeyBook(file)


def test_other_addresses_need_keys():
    with pytest.raises(ConfigError, match="keys_file"):
        ServiceConfig.build(host="0.0.0.0")
    assert ServiceConfig.build(host="0.0.0.0", keys_file="keys").keys_file == "keys"


def test_secrets_are_private(target):
    """Only the user of the process may read the state, and keys are in no file."""
    assert target.folder.stat().st_mode & 0o077 == 0
    for path in target.folder.rglob("*"):
        if path.is_file():
            assert b"tml-test" not in path.read_bytes(), path


def test_slow_bodies_do_not_stop_others(target):
    import socket

    host, port = target.url.removeprefix("http://").split(":")
    slow = socket.create_connection((host, int(port)))
    slow.sendall(
        b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\nX-API-Key: tml-slow\r\nContent-Length: 100\r\n\r\n{"
    )
    started = time.monotonic()
    assert target.client.get("healthz") == {"status": "ok"}
    assert time.monotonic() - started < 2
    slow.close()


def test_paths_of_links_stay_in_their_folder(target):
    """A signed link does not lead out of the folder of its archive."""
    made = target.client.ok("save_weights_external", model_id=target.model, seq_id=target.next_seq(), path="archive")
    target.client.result(made["request_id"])
    path = f"training_runs/{target.model}/checkpoints/external_weights/archive/external_weights_urls"
    urls = target.client.get(path)["urls"]
    assert set(urls) == {"adapter.npz", "adapter_config.json"}
    link = urls["adapter_config.json"]
    assert json.loads(httpx.get(link).content)["rank"] == 4
    assert httpx.get(link.replace("adapter_config.json", "..%2f..%2fcheckpoint.json")).status_code == 404
    signature = link.split("/files/")[1].split("/")[0]
    assert httpx.get(link.replace(signature, "0" * 64)).status_code == 403
    assert os.path.exists(target.folder)
