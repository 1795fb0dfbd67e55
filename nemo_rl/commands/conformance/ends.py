"""Properties of the end of a response: stops, limits, aborts, refusals, and the part that is written so far."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from nemo_rl.commands.conformance.case import (
    LONG,
    Case,
    NotOffered,
    answers_of,
    ask,
    load,
    midway,
    require,
    same,
    shown,
    start,
)
from nemo_rl.commands.conformance.references import model_of
from nemo_rl.models.generation.interfaces import Engine, GenerationRequest, ResponseSoFar
from nemo_rl.models.generation.texts import sampled_text
from nemo_rl.utils.errors import GenerationError


async def stops(engine: Engine, case: Case) -> None:
    """Stop tokens, stop strings and the end of sequence end a response and stay in it, and only if they are given."""
    free = [ask(prompt, seed=n, max_new_tokens=30) for n, prompt in enumerate(case.prompts[:5] * 4)]
    written = [result.token_ids.tolist() for result in await answers_of(engine, free)]
    requests, ends = [], []
    for request, tokens in zip(free, written, strict=True):
        for stop, end in _stops(case, tokens):
            again = ask(request.prompt_token_ids, request.seed, max_new_tokens=30, **stop)
            requests.append(again)
            ends.append((tokens[:end], stop))
    require(any("stop_strings" in stop for _, stop in ends), "no response has three tokens of plain text")
    for request, result, (tokens, stop) in zip(requests, await answers_of(engine, requests), ends, strict=True):
        found = (result.token_ids.tolist(), result.finish_reason)
        require(found == (tokens, "stop"), f"{stop}, {shown(request)}: {found}, due are {(tokens, 'stop')}")
    counts = Counter(token for tokens in written for token in tokens)
    await _end_of_sequence(engine, case, counts.most_common(1)[0][0])


def _stops(case: Case, tokens: list[int]) -> Iterator[tuple[dict[str, tuple[int | str, ...]], int]]:
    """Yield stops that a response meets before its end, and how many of its tokens remain.

    The end of sequence is among the stop tokens of every run, and some servers add it to the stop tokens of a request.
    """
    ids = (tokens[len(tokens) // 2], int(case.tokenizer.eos_token_id))
    yield {"stop_token_ids": ids}, next(n for n, token in enumerate(tokens, start=1) if token in ids)
    for first in range(3, len(tokens) - 4):
        text = str(case.tokenizer.decode(tokens[first : first + 3]))
        if not text.isprintable() or case.tokenizer.encode(text, add_special_tokens=False) != tokens[first : first + 3]:
            continue
        end = next(n for n in range(1, len(tokens)) if text in case.tokenizer.decode(tokens[:n]))
        yield {"stop_strings": (text,)}, end
        return


async def _end_of_sequence(engine: Engine, case: Case, common: int) -> None:
    """Check the end of sequence with weights that draw it as often as a common token."""
    eos = case.tokenizer.eos_token_id
    assert isinstance(eos, int), "the tokenizer has an end of sequence"
    model = model_of.__wrapped__(case.folder, 0)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[eos] = head[common]
    await load(engine, model, 90)
    free = [ask(prompt, seed=n, max_new_tokens=30) for n, prompt in enumerate(case.prompts[:5] * 4)]
    written = [result.token_ids.tolist() for result in await answers_of(engine, free)]
    require(any(eos in tokens[:-1] for tokens in written), "the end of sequence ends responses without being a stop")
    for stop in ({"stop_token_ids": (eos,)}, {"stop_strings": (str(case.tokenizer.decode([eos])),)}):
        requests = [ask(request.prompt_token_ids, request.seed, max_new_tokens=30, **stop) for request in free]
        for tokens, result in zip(written, await answers_of(engine, requests), strict=True):
            found = (result.token_ids.tolist(), result.finish_reason)
            due = (tokens[: tokens.index(eos) + 1], "stop") if eos in tokens else (tokens, "length")
            require(found == due, f"{stop}: {found}, due are {due}")
            text = sampled_text(case.tokenizer, due[0])
            require(result.text in (None, text), f"the text of {due[0]} is {result.text!r}, and must be {text!r}")
    await load(engine, case.model(), 0)


async def limits(engine: Engine, case: Case) -> None:
    """Responses end at max_new_tokens and at the context's end; what cannot be served is refused by name."""
    limit = case.max_model_len
    asked = [(ask([21, 22], max_new_tokens=1), 1), (ask([23] * (limit - 4), max_new_tokens=50), 4)]
    results = await answers_of(engine, [request for request, _ in asked])
    for (request, length), result in zip(asked, results, strict=True):
        found = (len(result.token_ids), result.finish_reason)
        require(found == (length, "length"), f"{shown(request)}: {found}, due are {(length, 'length')}")
    for prompt, why in (([21] * limit, "fills the context"), ([21, case.vocab_size + 99], "has an unknown token")):
        (answer,) = start(engine, [ask(prompt)])[1]
        await asyncio.wait([answer])
        error = answer.exception()
        require(
            isinstance(error, GenerationError),
            f"a prompt that {why} gives {error!r}, and must raise a GenerationError",
        )


def _long(case: Case, prompts: Sequence[int] = (0, 3)) -> list[GenerationRequest]:
    return [ask(case.prompts[n], seed=n, max_new_tokens=LONG) for n in prompts]


async def aborts(engine: Engine, case: Case) -> None:
    """An abort ends a request with the tokens so far; others go on, and unknown ids are ignored."""
    requests = _long(case)
    complete = await answers_of(engine, requests)

    async def abort(ids: list[str]) -> str:
        await engine.abort([ids[0], "unknown"])
        return ids[0]

    ended, results = await midway(engine, requests, abort, lambda _, results: 0 < len(results[0].token_ids) < LONG)
    count = len(results[0].token_ids)
    require(results[0].finish_reason == "abort", f"finish_reason={results[0].finish_reason} after an abort")
    due = complete[0].token_ids.tolist()[:count]
    require(results[0].token_ids.tolist() == due, "an aborted response has other tokens than the complete one")
    case.compare("aborted", case.model(), requests[0], results[0])
    require(same(results[1], complete[1], case.tolerance), "an abort changes the response to another request")
    await engine.abort([ended])


async def so_far(engine: Engine, case: Case) -> None:
    """`responses_so_far` returns the first tokens of running responses and does not disturb them."""
    ask_for = getattr(engine, "responses_so_far", None)
    if ask_for is None:
        raise NotOffered("it has no responses_so_far; unfinished responses start again in a resumed run")
    requests = _long(case)
    complete = await answers_of(engine, requests)

    async def look(ids: list[str]) -> dict[str, ResponseSoFar]:
        found: dict[str, ResponseSoFar] = await ask_for([*ids, "unknown"])
        return {"first": found[ids[0]], "second": found[ids[1]]} if found.keys() == set(ids) else {}

    parts, results = await midway(
        engine, requests, look, lambda parts, _: bool(parts) and all(len(part) for part in parts.values())
    )
    for part, result, right in zip(parts.values(), results, complete, strict=True):
        require(same(result, right, case.tolerance), "responses_so_far changes a response")
        tokens = part.token_ids.tolist()
        require(tokens == result.token_ids.tolist()[: len(part)], "the first tokens are not those of the response")
        error = float(abs(part.logprobs - result.logprobs[: len(part)]).max())
        require(error <= case.tolerance, f"the first log-probabilities differ by {error:.3g} from the response's")
    ids, answers = start(engine, [ask(case.prompts[0])])
    await asyncio.gather(*answers)
    require(await ask_for(ids) == {}, "a finished request is reported as running")
