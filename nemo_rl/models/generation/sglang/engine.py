"""Adapt SGLang servers to the `Engine` protocol.

    generate() ─► slot ─► /generate ─► answer
                    ▲                    │ "abort" by an update (pause_generation_mode: abort)
                    └── the rest of it ◄─┘
    begin_weight_update() ─► /pause_generation    load_tensors() ─► files
    finish_weight_update() ─► /update_weights_from_disk ─► /get_weight_version ─► /continue_generation

Invariant: each token has the version of the weights that drew it, either because the server says so (`weight_versions`
of newer releases), or because no request of the server outlives an update.
"""

import asyncio
import weakref
from collections.abc import Awaitable, Collection
from dataclasses import replace

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from nemo_rl.config.schema.model.generation import SglangConfig
from nemo_rl.models.generation.interfaces import (
    EngineSettings,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    ResponseSoFar,
    VersionSpan,
)
from nemo_rl.models.generation.remote.connection import EndpointError
from nemo_rl.models.generation.responses.continued import joined, rest_of
from nemo_rl.models.generation.sglang.server import SglangServer
from nemo_rl.models.generation.sglang.updates import WeightFolder
from nemo_rl.models.generation.sglang.wire import generate_body, read_answer, version_of
from nemo_rl.models.generation.texts import sampled_text
from nemo_rl.utils.errors import GenerationError, WeightSyncError

_MODE = "policy.generation.sglang_cfg.sglang_server_config.pause_generation_mode"


class SglangEngine:
    """A client of one SGLang server, which it has started, or of servers that run already."""

    def __init__(self, settings: EngineSettings) -> None:
        config: SglangConfig = settings.engine_kwargs["sglang_cfg"]
        self._server = SglangServer(settings)
        weakref.finalize(self, self._server.end)
        self._mode = config.sglang_server_config.pause_generation_mode
        self._sleeps = settings.can_sleep and config.sglang_server_config.needs_offload
        self._max_model_len = settings.max_model_len
        self._vocab_size = (
            AutoConfig.from_pretrained(settings.model_name, trust_remote_code=False).get_text_config().vocab_size
        )
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            settings.tokenizer_name, trust_remote_code=False
        )
        self._slots = asyncio.Semaphore(config.sglang_server_config.sglang_server_concurrency)
        self._weights = WeightFolder(settings.model_name, config.weight_folder)
        weakref.finalize(self, self._weights.remove)
        self._version, self._num_updates, self._is_asleep = 0, 0, False
        self._may_ask = asyncio.Event()
        self._may_ask.set()
        self._open: dict[str, asyncio.Task[GenerationResult]] = {}
        self._at_server: set[str] = set()
        self._aborted: set[str] = set()

    def generate(self, request_id: str, request: GenerationRequest) -> Awaitable[GenerationResult]:
        """See `Engine.generate`."""
        self._open[request_id] = asyncio.ensure_future(self._answered(request_id, request))
        return self._open[request_id]

    async def _answered(self, request_id: str, request: GenerationRequest) -> GenerationResult:
        self._check(request)
        part = ResponseSoFar.nothing()
        try:
            while True:
                async with self._slots:
                    await self._may_ask.wait()
                    result = await self._rest(request_id, request, part)
                if result.finish_reason != "abort" or request_id in self._aborted:
                    return replace(result, text=sampled_text(self._tokenizer, result.token_ids.tolist()))
                part = ResponseSoFar(result.token_ids, result.logprobs, result.weight_versions)
        finally:
            self._aborted.discard(request_id)
            del self._open[request_id]

    async def _rest(self, request_id: str, request: GenerationRequest, part: ResponseSoFar) -> GenerationResult:
        """Ask for the rest of a response; return it with the part that was there."""
        most = min(request.sampling.max_new_tokens, self._max_model_len - len(request.prompt_token_ids))
        if request_id in self._aborted or len(part) >= most:
            reason: FinishReason = "length" if len(part) >= most else "abort"
            spans = part.weight_versions or [VersionSpan(0, self._version)]
            return GenerationResult(part.token_ids, part.logprobs, reason, spans)
        # The same seed: a random number depends on its position too.
        rest = replace(rest_of(request, part), seed=request.seed)
        version, num_updates = self._version, self._num_updates
        room = self._max_model_len - len(rest.prompt_token_ids)
        self._at_server.add(request_id)
        try:
            answer = await self._server.answer(generate_body(request_id, rest, room))
        except EndpointError as refusal:
            raise GenerationError(f"SGLang refused a request: {refusal}") from refusal
        finally:
            self._at_server.discard(request_id)
        result, reports_versions, message = read_answer(answer)
        if result.finish_reason == "abort" and request_id not in self._aborted and num_updates == self._num_updates:
            raise GenerationError(f"SGLang ended a request by itself: {message}.")
        if not reports_versions:
            self._require_one_version(version)
            result = replace(result, weight_versions=[VersionSpan(0, version)])
        return self._joined(part, result, request)

    def _joined(self, part: ResponseSoFar, rest: GenerationResult, request: GenerationRequest) -> GenerationResult:
        if not len(rest.token_ids) and len(part):
            return GenerationResult(part.token_ids, part.logprobs, rest.finish_reason, part.weight_versions)
        return joined(part, rest, request.sampling.stop_strings, self._tokenizer)

    def _require_one_version(self, version: int) -> None:
        if self._version != version and self._mode != "abort":
            raise WeightSyncError(
                f"A response was drawn with weights of versions {version} and {self._version}, and this release of "
                f"SGLang does not report which tokens are of which (meta_info.weight_versions). Set {_MODE}=abort."
            )

    def _check(self, request: GenerationRequest) -> None:
        ids = request.prompt_token_ids
        if not 0 < len(ids) < self._max_model_len:
            raise GenerationError(f"A prompt of {len(ids)} tokens does not fit the context of {self._max_model_len}.")
        if not all(0 <= token < self._vocab_size for token in ids):
            raise GenerationError(f"A prompt holds token ids outside 0..{self._vocab_size - 1}.")
        if request.sampling.bad_words:
            raise GenerationError("SGLang has no bad words (policy.generation.bad_words).")

    async def abort(self, request_ids: Collection[str]) -> None:
        """See `Engine.abort`."""
        self._aborted |= set(request_ids) & self._open.keys()
        for request_id in set(request_ids) & self._at_server:
            await self._server.tell("abort_request", {"rid": request_id, "abort_all": False})

    async def begin_weight_update(self) -> None:
        """See `Engine.begin_weight_update`."""
        self._may_ask.clear()
        self._num_updates += 1
        self._weights.clear()
        await self._server.tell("pause_generation", {"mode": self._mode})
        while self._mode == "abort" and self._at_server:
            await asyncio.sleep(0.005)

    async def load_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """See `Engine.load_tensors`."""
        self._weights.take(tensors)

    async def finish_weight_update(self, version: int) -> list[str]:
        """See `Engine.finish_weight_update`.

        Raises:
            WeightSyncError: a server has another version afterwards.
        """
        missing = self._weights.missing
        body = {
            "model_path": str(self._weights.path),
            "load_format": "auto",
            "weight_version": str(version),
            "flush_cache": self._mode != "in_place",
        }
        await self._server.tell("update_weights_from_disk", body)
        found = [version_of(answer["weight_version"]) for answer in await self._server.tell("get_weight_version")]
        if set(found) != {version}:
            raise WeightSyncError(f"SGLang servers report weights of versions {found} after an update to {version}.")
        self._weights.clear()
        self._version = version
        await self._server.tell("continue_generation", {})
        self._may_ask.set()
        return missing

    async def layer_outputs(self, token_ids: list[int]) -> list[torch.Tensor]:
        """Return nothing: the interface has no outputs of layers."""
        return []

    async def sleep(self) -> None:
        """See `Engine.sleep`; only a server that shares its GPUs with the policy frees its memory."""
        if self._sleeps and not self._is_asleep:
            await self._server.tell("release_memory_occupation", {})
            self._is_asleep = True

    async def wake_up(self) -> None:
        """See `Engine.wake_up`."""
        if self._is_asleep:
            await self._server.tell("resume_memory_occupation", {})
            self._is_asleep = False
