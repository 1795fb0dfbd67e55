"""A server that speaks the documented HTTP interface of SGLang over the Hugging Face engine.

It has SGLang's properties that matter to a client: log-probabilities before filters, random numbers by seed and
position, stop tokens that `ignore_eos` ignores, versions of spans, and pauses that abort or retract. The package's
`launch_server` takes the same options.
"""

import argparse
import asyncio
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import torch
import uvicorn
from generation_helpers import make_settings
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nemo_rl.distributed.ranks.rendezvous import bind_free_port
from nemo_rl.models.generation.hf import HfEngine
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, SamplingParams
from nemo_rl.utils.errors import GenerationError, NonFiniteError

_LARGE = 1_000_003


class Model(HfEngine):
    """Draws as SGLang does with deterministic inference."""

    def extend(self, rows: Sequence[Any], logits_bV: torch.Tensor) -> None:
        for row in rows:
            row.generator.manual_seed((row.request.seed + _LARGE * len(row.tokens)) % 2**63)
        super().extend(rows, logits_bV)
        for row, logits_V in zip(rows, logits_bV, strict=True):
            temperature = row.request.sampling.temperature or 1.0
            row.logprobs[-1] = float((logits_V.float() / temperature).log_softmax(-1)[row.last_token])


class StandIn:
    """The server's state: the model, the version of its weights, and whether it is paused."""

    def __init__(self, folder: str, max_model_len: int, *, reports_versions: bool) -> None:
        settings = make_settings(Path(folder), "hf", load_weights=True, max_model_len=max_model_len)
        self.model = Model(settings)
        self.labels = {0: "default"}
        self.reports_versions = reports_versions
        self.running: set[str] = set()
        self.may_begin = asyncio.Event()
        self.may_begin.set()
        self.is_asleep = False
        self.calls: list[str] = []

    @property
    def label(self) -> str:
        """The version of the weights."""
        return self.labels[max(self.labels)]

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer `/generate`."""
        assert not self.is_asleep
        await self.may_begin.wait()
        given, rid = body["sampling_params"], body["rid"]
        sampling = SamplingParams(
            temperature=given["temperature"],
            top_k=None if given["top_k"] == -1 else given["top_k"],
            top_p=given["top_p"],
            max_new_tokens=given["max_new_tokens"],
            stop_token_ids=() if given["ignore_eos"] else (*given["stop_token_ids"], 258),
            stop_strings=tuple(given["stop"]),
        )
        self.running.add(rid)
        try:
            request = GenerationRequest(body["input_ids"], sampling, given["sampling_seed"])
            return self._described(await self.model.generate(rid, request))
        finally:
            self.running.discard(rid)

    def _described(self, result: GenerationResult) -> dict[str, Any]:
        ids, logprobs = result.token_ids.tolist(), result.logprobs.tolist()
        starts = [span.start for span in result.weight_versions]
        spans = zip(result.weight_versions, [*starts[1:], len(ids)], strict=True)
        meta: dict[str, Any] = {
            "finish_reason": {"type": result.finish_reason},
            "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, ids, strict=True)],
            "weight_version": self.label,
        }
        if self.reports_versions:
            meta["weight_versions"] = [
                {"version": self.labels[span.version], "start": span.start, "end": end} for span, end in spans
            ]
        return {"text": result.text, "output_ids": ids, "meta_info": meta}

    async def pause(self, mode: str) -> None:
        """Answer `/pause_generation`."""
        self.may_begin.clear()
        if mode == "abort":
            await self.model.abort(set(self.running))
        self.model._may_step.clear()

    async def resume(self) -> None:
        """Answer `/continue_generation`."""
        self.model._may_step.set()
        self.may_begin.set()

    async def update(self, body: dict[str, Any]) -> None:
        """Answer `/update_weights_from_disk`."""
        await self.model.begin_weight_update()
        for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
            await self.model.load_tensors(list(load_file(file).items()))
        number = max(self.labels) + (self.label != body["weight_version"])
        self.labels[number] = body["weight_version"]
        await self.model.finish_weight_update(number)
        if not self.may_begin.is_set():
            self.model._may_step.clear()


def application(state: StandIn) -> Starlette:
    """Return the routes of a server."""

    async def generate(request: Request) -> Response:
        try:
            return JSONResponse(await state.generate(await request.json()))
        except GenerationError as refusal:
            return JSONResponse({"error": {"message": str(refusal)}}, 400)
        except NonFiniteError as broken:
            return JSONResponse({"error": {"message": str(broken)}}, 500)

    async def control(request: Request) -> Response:
        name = request.url.path[1:]
        state.calls += [name] if request.method == "POST" else []
        body = await request.json() if request.method == "POST" else {}
        answer: dict[str, Any] = {"success": True, "message": ""}
        if name == "pause_generation":
            await state.pause(body["mode"])
        elif name == "continue_generation":
            await state.resume()
        elif name == "abort_request":
            await state.model.abort([body["rid"]])
        elif name == "update_weights_from_disk":
            await state.update(body)
        elif name == "get_weight_version":
            answer = {"weight_version": state.label}
        elif name in ("release_memory_occupation", "resume_memory_occupation"):
            state.is_asleep = name.startswith("release")
        elif name == "calls":
            answer = {"calls": state.calls}
        return JSONResponse(answer)

    controls = (
        *("pause_generation", "continue_generation", "abort_request", "update_weights_from_disk"),
        *("release_memory_occupation", "resume_memory_occupation"),
    )
    return Starlette(
        routes=[
            Route("/generate", generate, methods=["POST"]),
            *(Route(f"/{name}", control, methods=["POST"]) for name in controls),
            *(Route(f"/{name}", control, methods=["GET"]) for name in ("health", "get_weight_version", "calls")),
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    """Serve until the process is ended; options as those of `sglang.launch_server`."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--enable-deterministic-inference", action="store_true")
    parser.add_argument("--without-versions", action="store_true", help="as releases before August 2026")
    parser.add_argument("--max-model-len", type=int, default=256)
    given, _ = parser.parse_known_args(arguments)
    assert given.enable_deterministic_inference, "seeds have no effect without it"

    async def serve() -> None:
        state = StandIn(given.model_path, given.max_model_len, reports_versions=not given.without_versions)
        config = uvicorn.Config(application(state), "127.0.0.1", given.port, log_level="error", lifespan="off")
        await uvicorn.Server(config).serve()

    asyncio.run(serve())


class Running:
    """A stand-in in a process of its own.

    Attributes:
        port: where it listens.
    """

    def __init__(self, folder: str, *options: str) -> None:
        listener = bind_free_port("127.0.0.1", None, None)
        self.port = listener.getsockname()[1]
        listener.close()
        command = ["--model-path", folder, "--port", str(self.port), "--enable-deterministic-inference", *options]
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=main, args=(command,), daemon=True)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self._process.start()

    def wait(self) -> None:
        """Wait until it answers."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/health").status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.1)
        raise AssertionError("the stand-in did not start")

    def calls(self) -> list[str]:
        """Return the paths of the calls that change something, but for `/generate`."""
        answer: list[str] = httpx.get(f"http://127.0.0.1:{self.port}/calls").json()["calls"]
        return answer

    def kill(self) -> None:
        """End it as the kernel does without memory."""
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
