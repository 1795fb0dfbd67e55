"""Adapt SGLang servers to the `Engine` protocol: convert their JSON, and send new weights as files.

    generate() ─► slot ─► /generate ─► answer
                    ▲                    │ "abort" by an update (pause_generation_mode: abort)
                    └── the rest of it ◄─┘
    begin_weight_update() ─► /pause_generation    load_tensors() ─► files
    finish_weight_update() ─► /update_weights_from_disk ─► /get_weight_version ─► /continue_generation

Invariant: each token has the version of the weights that drew it. Either the server reports this version
(`weight_versions` of newer releases), or no request continues during an update.

This module relies on the following facts about SGLang. Log-probabilities are those after the temperature and before
top-k and top-p. `ignore_eos` also ignores the stop tokens of the request. A seed is used only with deterministic
inference, where the random number of a token depends only on the seed and on the token's position.

A server gets new weights through files: each group of tensors is written as it arrives, and the server reads all files
at the end. Files are SGLang's most portable way to update: they need no shared process group and no GPU of the sender.
The folder must be visible to the server. It holds one copy of the weights and is emptied after each update.
"""

import asyncio
import math
import shutil
import tempfile
import weakref
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from nemo_rl.config.schema.model.generation import SglangConfig
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.models.generation.interfaces import (
    EngineSettings,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    ResponseSoFar,
    VersionSpan,
)
from nemo_rl.models.generation.remote.connection import EndpointError
from nemo_rl.models.generation.responses import joined, rest_of, sampled_text
from nemo_rl.models.generation.sglang.server import SglangServer
from nemo_rl.models.huggingface.checkpoint_names import in_checkpoint
from nemo_rl.models.huggingface.load import load_model_config, read_config
from nemo_rl.models.huggingface.tensor_files import model_folder
from nemo_rl.utils.errors import GenerationError, NonFiniteError, WeightSyncError

_ALL_TOKENS = -1
_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class ServerAnswer(NamedTuple):
    """An answer of the server."""

    result: GenerationResult
    """Tokens of the answer with the server's spans. If it reports none, there is one span of version -1."""
    reports_versions: bool
    """Whether the server reports spans."""
    message: str
    """The server's text about the reason of the end."""


def generate_body(request_id: str, request: GenerationRequest, room: int) -> dict[str, Any]:
    """Return the fields of a request.

    Args:
        request_id: Id of the request at the server.
        room: Number of tokens left in the context.
    """
    sampling = request.sampling
    return {
        "rid": request_id,
        "input_ids": request.prompt_token_ids,
        "return_logprob": True,
        "stream": False,
        "sampling_params": {
            "max_new_tokens": min(sampling.max_new_tokens, room),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or _ALL_TOKENS,
            "min_p": 0.0,
            "stop": list(sampling.stop_strings),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": not sampling.stop_token_ids,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "sampling_seed": request.seed,
        },
    }


def read_answer(answer: Any) -> ServerAnswer:
    """Read the JSON of an answer.

    Raises:
        GenerationError: The server refused the request after it had accepted it.
        NonFiniteError: A log-probability is not finite.
        ValueError: The JSON is not an answer.
    """
    try:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]
        kind = _REASONS[reason["type"]]
        drawn = [(value, int(token)) for value, token, *_ in meta.get("output_token_logprobs") or ()]
        logprobs = [math.nan if value is None else float(value) for value, _ in drawn]
        versions = meta.get("weight_versions") or ()
        spans = [VersionSpan(int(span["start"]), version_of(span["version"])) for span in versions]
    except (TypeError, LookupError, ValueError) as error:
        raise ValueError(f"SGLang's answer is not as documented ({error!r}): {str(answer)[:300]}") from error
    if kind == "abort" and reason.get("status_code") in (400, 413, 422):
        raise GenerationError(f"SGLang refused a request: {reason.get('message')}")
    if not np.isfinite(logprobs).all():
        raise NonFiniteError("SGLang's log-probabilities are not finite, so weights or activations are not.")
    tokens = np.array([token for _, token in drawn], np.int32)
    result = GenerationResult(tokens, np.array(logprobs, np.float32), kind, spans or [VersionSpan(0, -1)])
    return ServerAnswer(result, bool(spans), str(reason.get("message") or "no reason is given"))


def version_of(label: Any) -> int:
    """Return the version of a label. The label "default" is version 0: no weights were sent yet."""
    text = str(label)
    return int(text) if text.isdigit() else 0


class WeightFolder:
    """Folder that stores the tensors of one update as files.

    Args:
        model_name: Local folder or hub id of the model. Its configuration files are copied into the folder.
        parent: Parent folder. If None, the system's folder for temporary files.
    """

    def __init__(self, model_name: str, parent: str | None) -> None:
        source = model_folder(model_name)
        self.path = Path(tempfile.mkdtemp(prefix="nemo-rl-weights-", dir=parent))
        self.path.chmod(0o755)  # the server may belong to another user
        for file in source.glob("*.json"):
            if not file.name.endswith(".safetensors.index.json"):
                shutil.copy(file, self.path / file.name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(read_config(source))
        self._expected = {name for name, _ in in_checkpoint(model, model.named_parameters())}
        self._received: set[str] = set()
        self._num_files = 0

    def clear(self) -> None:
        """Remove all tensors."""
        for file in self.path.glob("*.safetensors"):
            file.unlink()
        self._received, self._num_files = set(), 0

    def take(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Write some tensors to a file."""
        if not tensors:
            return
        self._num_files += 1
        file = self.path / f"model-{self._num_files:05d}.safetensors"
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors}, file)
        file.chmod(0o644)
        self._received |= {name for name, _ in tensors}

    @property
    def missing(self) -> list[str]:
        """Return the checkpoint names of parameters that were not received."""
        return sorted(self._expected - self._received)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


_MODE = "policy.generation.sglang_cfg.sglang_server_config.pause_generation_mode"


class SglangEngine:
    """Client of one SGLang server that it has started, or of servers that are already running."""

    def __init__(self, settings: EngineSettings) -> None:
        config: SglangConfig = settings.engine_kwargs["sglang_cfg"]
        self._server = SglangServer(settings)
        weakref.finalize(self, self._server.end)
        self._mode = config.sglang_server_config.pause_generation_mode
        self._sleeps = settings.can_sleep and config.sglang_server_config.needs_offload
        self._max_model_len = settings.max_model_len
        self._vocab_size = load_model_config(settings.model_name).get_text_config().vocab_size
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(settings.tokenizer_name)
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
        """Accept a request, and return an awaitable response (`Engine.generate`)."""
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
        """Request the rest of a response, and return it joined with the part so far."""
        most = min(request.sampling.max_new_tokens, self._max_model_len - len(request.prompt_token_ids))
        if request_id in self._aborted or len(part) >= most:
            reason: FinishReason = "length" if len(part) >= most else "abort"
            spans = part.weight_versions or [VersionSpan(0, self._version)]
            return GenerationResult(part.token_ids, part.logprobs, reason, spans)
        # The seed stays the same, because the random number of a token also depends on its position.
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
            raise GenerationError("SGLang does not support bad words (policy.generation.bad_words).")

    async def abort(self, request_ids: Collection[str]) -> None:
        """End requests with their tokens so far (`Engine.abort`)."""
        self._aborted |= set(request_ids) & self._open.keys()
        for request_id in set(request_ids) & self._at_server:
            await self._server.tell("abort_request", {"rid": request_id, "abort_all": False})

    async def begin_weight_update(self) -> None:
        """Prepare for new weights (`Engine.begin_weight_update`)."""
        self._may_ask.clear()
        self._num_updates += 1
        self._weights.clear()
        await self._server.tell("pause_generation", {"mode": self._mode})
        while self._mode == "abort" and self._at_server:
            await asyncio.sleep(0.005)

    async def load_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load some of the new tensors (`Engine.load_tensors`)."""
        self._weights.take(tensors)

    async def finish_weight_update(self, version: int) -> list[str]:
        """Activate the new weights (`Engine.finish_weight_update`).

        Raises:
            WeightSyncError: A server reports another version after the update.
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
        """Return nothing, because the interface does not provide outputs of layers."""
        return []

    async def sleep(self) -> None:
        """Free memory until `wake_up`, if the server shares its GPUs with the policy."""
        if self._sleeps and not self._is_asleep:
            await self._server.tell("release_memory_occupation", {})
            self._is_asleep = True

    async def wake_up(self) -> None:
        """Allocate memory again (`Engine.wake_up`)."""
        if self._is_asleep:
            await self._server.tell("resume_memory_occupation", {})
            self._is_asleep = False
