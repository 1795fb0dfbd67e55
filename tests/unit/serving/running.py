"""Run a service with the fake models on a thread, and call it without a client's library."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fake_models import FakeModels

from nemo_rl.config.schema.service import ServiceConfig
from nemo_rl.serving.http.server import serving
from nemo_rl.serving.wire.messages import ForwardBackwardOutput, ForwardBackwardRequest, SampleResponse

NAMES = ["tiny", "Qwen/Tiny"]
KEY = "tml-test"


def config_in(folder: Path, **keys: Any) -> ServiceConfig:
    return ServiceConfig.build(**{"state_dir": str(folder), "port": 0, "log_dir": None} | keys)


@contextlib.contextmanager
def service(models: FakeModels, config: ServiceConfig, tokenizer: Any = None, **more: Any) -> Iterator[str]:
    """Serve on a thread, and give the address."""
    address: list[str] = []
    started, ended = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    async def main() -> None:
        async with serving(models, config, NAMES, tokenizer, **more) as url:
            address.append(url)
            started.set()
            while not ended.is_set():
                await asyncio.sleep(0.02)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(30)
    if failures:
        raise failures[0]
    try:
        yield address[0]
    finally:
        ended.set()
        thread.join(20)
        assert not thread.is_alive()


class Raw:
    """A client without the library."""

    def __init__(self, url: str, key: str = KEY) -> None:
        self.http = httpx.Client(base_url=url, headers={"x-api-key": key}, timeout=60)

    def post(self, path: str, /, **body: Any) -> httpx.Response:
        return self.http.post(f"/api/v1/{path}", json=body)

    def ok(self, path: str, /, **body: Any) -> dict[str, Any]:
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, path: str) -> dict[str, Any]:
        answer = self.http.get(f"/api/v1/{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def session(self) -> str:
        return self.ok("create_session", tags=[], user_metadata=None, sdk_version="0.38.0")["session_id"]

    def model(self, session: str, number: int = 0, seed: int = 1, rank: int = 4) -> str:
        lora = {"rank": rank, "seed": seed}
        made = self.ok("create_model", session_id=session, model_seq_id=number, base_model="tiny", lora_config=lora)
        return self.result(made["request_id"])["model_id"]

    def retrieve(self, request_id: str) -> httpx.Response:
        while True:
            answer = self.post("retrieve_future", request_id=request_id)
            if answer.status_code != 408:
                return answer

    def result(self, request_id: str) -> Any:
        answer = self.retrieve(request_id)
        assert answer.status_code == 200, answer.text
        if answer.headers["content-type"] == "application/x-protobuf":
            return answer.content
        found = answer.json()
        assert "error" not in found, found
        return found

    def error(self, request_id: str) -> str:
        answer = self.retrieve(request_id).json()
        assert answer["category"] == "user", answer
        return answer["error"]

    def submit_pass(self, model: str, seq_id: int, rows: list[list[int]], **more: Any) -> dict[str, Any]:
        answer = self.http.post("/api/v1/forward_backward", content=pass_body(model, seq_id, rows, **more))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def output(self, request_id: str) -> tuple[list[np.ndarray], dict[str, float]]:
        message = ForwardBackwardOutput()
        message.ParseFromString(self.result(request_id))
        arrays = []
        for record in message.loss_fn_outputs:
            field = record.fields["logprobs"]
            offsets, values = np.frombuffer(field.offsets, "<i8") // 4, np.frombuffer(field.data, "<f4")
            arrays += [values[start:end] for start, end in zip(offsets, offsets[1:], strict=False)]
        return arrays, dict(message.metrics)

    def samples(self, request_id: str) -> list[list[int]]:
        message = SampleResponse()
        message.ParseFromString(self.result(request_id))
        return [np.frombuffer(each.tokens, "<i4").tolist() for each in message.sequences]


def pass_message(model: str, seq_id: int, rows: list[list[int]], loss: str = "cross_entropy", **more: Any) -> Any:
    """Each row has the tokens and one more as the last target; weights are 1."""
    message = ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn=loss, **more)
    for row in rows:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(row[:-1], "<i4").tobytes()
        inputs = {"target_tokens": np.array(row[1:], "<i8"), "weights": np.ones(len(row) - 1, "<f4")}
        for name, values in inputs.items():
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = values.tobytes(), 2 if values.dtype == np.int64 else 1
            tensor.shape.append(len(values))
    return message


def pass_body(model: str, seq_id: int, rows: list[list[int]], **more: Any) -> bytes:
    return pass_message(model, seq_id, rows, **more).SerializeToString()
