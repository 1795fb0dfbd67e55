"""Define the routes in OpenAI's form, whose model is a base model or the path of a checkpoint.

Invariant: a request with a seed gives the tokens that asample gives for the prompt's tokens and the same seed.
"""

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nemo_rl.agents.dialects.chat_completions import ChatCompletions
from nemo_rl.agents.dialects.completions import Completions
from nemo_rl.agents.dialects.interface import Dialect
from nemo_rl.agents.endpoint.answers import before_stop, short_id
from nemo_rl.agents.endpoint.calls import CallAnswer, CallError, CallRequest
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.host.guarded_http import ConnectionGuard
from nemo_rl.models.generation.interfaces import GenerationResult, SamplingParams
from nemo_rl.models.generation.responses import sampled_text
from nemo_rl.serving.http.requests import read_raw, user_of
from nemo_rl.serving.interfaces import RequestError
from nemo_rl.serving.limits import RefusedError
from nemo_rl.serving.service import Service
from nemo_rl.serving.store.keys import KeyBook
from nemo_rl.serving.wire.bodies import read_json
from nemo_rl.serving.wire.passes import read_tokens
from nemo_rl.serving.wire.samples import SampleCall
from nemo_rl.utils.seed import derive_seed

_PREFIX = "/oai/api"
_MOST_ANSWERS = 128


class CompletionRoutes:
    """Handlers of the routes in OpenAI's form.

    Args:
        service: what samples.
        tokenizer: of the base model.
        keys: users.
        guard: connections.
    """

    def __init__(self, service: Service, tokenizer: TokenizerType, keys: KeyBook, guard: ConnectionGuard) -> None:
        self._service = service
        self._tokenizer = tokenizer
        self._keys = keys
        self._guard = guard
        self._number = 0

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [self._route(dialect) for dialect in (Completions(), ChatCompletions())]

    def _route(self, dialect: Dialect) -> Route:
        async def handle(request: Request) -> Response:
            try:
                user = user_of(request, self._keys, self._guard)
                body = read_json(await read_raw(request, int(self._service.config.max_request_mb * 2**20)))
                return await self._answer(dialect, body, user)
            except ClientDisconnect:
                return Response(status_code=499)
            except CallError as error:
                found = error
            except RefusedError as error:
                found = CallError(error.status, error.message)
            except RequestError as error:
                found = CallError(400, str(error))
            return JSONResponse(dialect.error(found), found.status)

        return Route(f"{_PREFIX}{dialect.path}", handle, methods=["POST"])

    async def _answer(self, dialect: Dialect, body: Mapping[str, Any], user: str) -> Response:
        call = dialect.read(body, {})
        if body.get("stream"):
            raise CallError(400, "Answers are not streamed here; leave out stream.", "unsupported_parameter", "stream")
        _refuse_forms(call)
        prompt = await self._prompt(call)
        sample = SampleCall(prompt, self._sampling(call, len(prompt)), self._seeds(call), None, False, 0)
        number = len(sample.seeds)
        self._service.limits.check_samples(user, number)
        async with (
            self._service.sampling.gate.place(user, number),
            self._sampler(str(body.get("model", "")), user) as name,
        ):
            results = await self._service.sampling.sequences(name, sample)
        answers = [self._read(call, prompt, *each) for each in zip(sample.seeds, results, strict=True)]
        return JSONResponse(dialect.response(body, call, answers, {}))

    @contextlib.asynccontextmanager
    async def _sampler(self, model: str, user: str) -> AsyncIterator[str | None]:
        """Give the sampler that a request names for the time of a block."""
        folder: Path | None = None
        if model.startswith("tinker://"):
            state = self._service.state
            folder = state.checkpoints.files_of(state.checkpoint(user, model))
        else:
            self._service.checked_base(model)
        async with self._service.samplers.use(folder) as name:
            yield name

    async def _prompt(self, call: CallRequest) -> list[int]:
        """Return the tokens of a prompt or of a conversation."""
        if isinstance(call.prompt, str):
            tokens = self._tokenizer(call.prompt, add_special_tokens=False)["input_ids"]
        elif call.prompt is not None:
            tokens = list(call.prompt)
        else:
            rendering = asyncio.create_task(asyncio.to_thread(self._rendered, call))
            await asyncio.wait({rendering})
            # Templates raise errors of any kind for unexpected messages.
            error = rendering.exception()
            if error is not None:
                message = f"The messages cannot be rendered: {error}"
                raise CallError(400, message, "invalid_messages", "messages") from error
            tokens = rendering.result()
        return read_tokens([tokens], "prompt", self._service.models.limits).tolist()

    def _rendered(self, call: CallRequest) -> list[int]:
        """Return the tokens of a conversation."""
        return list(
            self._tokenizer.apply_chat_template(
                [dict(message) for message in call.messages],
                add_generation_prompt=not call.continues_last,
                continue_final_message=call.continues_last,
                tokenize=True,
                return_dict=False,
                **call.template_kwargs,
            )
        )

    def _sampling(self, call: CallRequest, length: int) -> SamplingParams:
        room = self._service.models.limits.max_context - length
        if room < 1:
            raise CallError(400, f"The prompt has {length} tokens and leaves no room.", "context_length_exceeded")
        return SamplingParams(
            temperature=1.0 if call.temperature is None else call.temperature,
            top_k=call.top_k if call.top_k is not None and call.top_k > 0 else None,
            top_p=1.0 if call.top_p is None else call.top_p,
            max_new_tokens=min(room, call.max_tokens or room),
            stop_strings=call.stop,
            stop_token_ids=self._service.models.limits.eos_ids,
        )

    def _seeds(self, call: CallRequest) -> list[int]:
        if call.num_answers > _MOST_ANSWERS:
            raise CallError(400, f"n is {call.num_answers}; at most {_MOST_ANSWERS} are allowed.", parameter="n")
        self._number += 1
        path = ("call", self._number) if call.seed is None else ("seeded", call.seed)
        return [derive_seed(0, *path, number) for number in range(call.num_answers)]

    def _read(self, call: CallRequest, prompt: list[int], seed: int, result: GenerationResult) -> CallAnswer:
        tokens = result.token_ids.tolist()
        text, stop = before_stop(sampled_text(self._tokenizer, tokens), call.stop)
        decode = self._tokenizer.decode
        return CallAnswer(
            short_id("call", seed),
            text,
            None,
            (),
            "length" if result.finish_reason == "length" else "stop",
            stop,
            array("i", prompt),
            array("i", tokens),
            array("f", result.logprobs.tolist()),
            token_texts=[str(decode([token])) for token in tokens] if call.reads_token_texts else [],
        )


def _refuse_forms(call: CallRequest) -> None:
    """Refuse what only an endpoint of agents serves."""
    if call.tools or call.grammar is not None or call.forced_tool is not None:
        raise CallError(400, "Tools and response formats are not served here; leave them out.", "unsupported_parameter")
