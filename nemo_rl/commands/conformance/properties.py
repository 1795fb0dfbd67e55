"""Check the properties of engines: sampling, the end of responses, new weights, sleep and failure."""

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from nemo_rl.commands.conformance.case import (
    LONG,
    Case,
    ContractError,
    NotOffered,
    answers_of,
    ask,
    distribution,
    load,
    logits_of,
    logprobs_of,
    midway,
    model_of,
    require,
    same,
    shown,
    start,
    tensors_of,
)
from nemo_rl.models.generation.interfaces import (
    Engine,
    GenerationRequest,
    GenerationResult,
    ResponseSoFar,
    SamplingParams,
)
from nemo_rl.models.generation.responses import sampled_text
from nemo_rl.models.generation.rows import bad_word_ids, banned_tokens
from nemo_rl.models.huggingface.layers import decoder_layers, recorded_outputs
from nemo_rl.utils.errors import GenerationError, NemoRLError

_SAMPLES = 400
_EXPECTED = 5.0
"""Expected count above which a token has its own bin in the chi-square statistic."""
_QUANTILE = 4.0
"""Limit of the chi-square statistic, in standard deviations; a correct engine exceeds it with probability 3e-5."""


async def greedy(engine: Engine, case: Case) -> None:
    """At temperature 0 the most likely token is sampled, with the log-probability of the model."""
    requests = [ask(prompt, temperature=0.0) for prompt in case.prompts]
    for request, result in zip(requests, await answers_of(engine, requests), strict=True):
        tokens = result.token_ids.tolist()
        likeliest = logits_of(case.model(), request.prompt_token_ids, tokens).argmax(-1).tolist()
        require(tokens == likeliest, f"{shown(request)}: tokens {tokens}, the most likely ones are {likeliest}")
        require(len(tokens) == 12, f"{len(tokens)} tokens instead of 12")
        case.compare("greedy", case.model(), request, result)


async def logprobs(engine: Engine, case: Case) -> None:
    """Log-probabilities belong to the model's distribution at the request's temperature."""
    await _compare(engine, case, [{"temperature": temperature} for temperature in (1.0, 0.6, 1.7)])


async def filters(engine: Engine, case: Case) -> None:
    """top_k and top_p exclude tokens, and log-probabilities belong to the distribution that remains."""
    both = {"temperature": 1.3, "top_k": 20, "top_p": 0.7}
    await _compare(engine, case, [{"top_k": 5}, {"top_p": 0.8}, both])


async def _compare(engine: Engine, case: Case, kinds: list[dict[str, float]]) -> None:
    pairs = [(prompt, kind) for kind in kinds for prompt in case.prompts]
    requests = [ask(prompt, seed=number, **kind) for number, (prompt, kind) in enumerate(pairs)]
    for request, result in zip(requests, await answers_of(engine, requests), strict=True):
        case.compare("sampled", case.model(), request, result)


async def samples(engine: Engine, case: Case) -> None:
    """Samples of one prompt with different seeds follow the model's distribution (chi-square test of 400 samples)."""
    prompt, sampling = case.prompts[1], SamplingParams(temperature=1.5, max_new_tokens=1)
    requests = [ask(prompt, seed=seed, temperature=1.5, max_new_tokens=1) for seed in range(_SAMPLES)]
    counts = Counter(int(result.token_ids[0]) for result in await answers_of(engine, requests))
    expected = distribution(case.model(), prompt, [0], sampling)[0].exp() * _SAMPLES
    own = [token for token, count in enumerate(expected.tolist()) if count >= _EXPECTED]
    bins = [(counts[token], float(expected[token])) for token in own]
    bins.append((_SAMPLES - sum(count for count, _ in bins), max(_SAMPLES - sum(right for _, right in bins), 1e-9)))
    statistic = sum((count - right) ** 2 / right for count, right in bins if right > 1.0 or count)
    freedom = max(len(bins) - 1, 1)
    # Wilson and Hilferty, "The Distribution of Chi-Square", 1931.
    limit = freedom * (1 - 2 / (9 * freedom) + _QUANTILE * math.sqrt(2 / (9 * freedom))) ** 3
    require(
        statistic <= limit,
        f"{_SAMPLES} samples of one prompt have a chi-square of {statistic:.0f} over {freedom} degrees of freedom "
        f"against the model's distribution; at most {limit:.0f} are plausible",
    )


async def seeds(engine: Engine, case: Case) -> None:
    """A seed determines a response, independent of other requests and their order. Other seeds give other responses."""
    crowd = [ask(prompt, seed=100 + n) for n, prompt in enumerate([*case.prompts, *case.prompts])]
    together = await answers_of(engine, crowd)
    backwards = (await answers_of(engine, crowd[::-1]))[::-1]
    for number, (one, other) in enumerate(zip(together, backwards, strict=True)):
        require(same(one, other, case.tolerance), f"{shown(crowd[number])}: another response in another order")
    for number in (0, 4):
        (alone,) = await answers_of(engine, [crowd[number]])
        require(same(alone, together[number], case.tolerance), f"{shown(crowd[number])}: another response alone")
    large = [ask(case.prompts[1], seed=2**63 - 1 - n) for n in range(8)]
    found = {tuple(result.token_ids.tolist()) for result in await answers_of(engine, large)}
    require(len(found) == len(large), f"{len(large)} seeds below 2**63 gave only {len(found)} responses")


async def batch_invariance(engine: Engine, case: Case) -> None:
    """Answers have the same bits alone, with others, and in another order, if the engine declares it.

    Raises:
        NotOffered: the engine does not declare `batch_invariant`.
    """
    if not getattr(engine, "batch_invariant", False):
        raise NotOffered("answers may depend in their last bits on what runs at the same time")
    requests = [ask(prompt, seed=number) for number, prompt in enumerate(case.prompts)]
    alone = [(await answers_of(engine, [request]))[0] for request in requests]
    together = await answers_of(engine, requests)
    reverse = (await answers_of(engine, [*requests[::-1], *requests]))[: len(requests)][::-1]
    for how, answers in (("with others", together), ("in another order", reverse)):
        for request, one, other in zip(requests, alone, answers, strict=True):
            require(same(one, other, 0.0), f"{shown(request)}: the answer alone has other bits than the one {how}")


async def bad_words(engine: Engine, case: Case) -> None:
    """A bad word is never completed, and the distribution excludes the token that would complete it."""
    prompts = case.prompts[:5] * 4
    free = [ask(prompt, seed=n) for n, prompt in enumerate(prompts)]
    written = [result.token_ids.tolist() for result in await answers_of(engine, free)]
    single = next(text for tokens in written for token in tokens if (text := _text(case, [token])))
    pairs = (list(pair) for tokens in written for pair in itertools.pairwise(tokens))
    double = next(text for pair in pairs if (text := _text(case, pair)) and single not in text)
    sequences = bad_word_ids([single, double], case.tokenizer)
    requests = [ask(prompt, seed=n, bad_words=(single, double)) for n, prompt in enumerate(prompts)]
    for request, result in zip(requests, await answers_of(engine, requests), strict=True):
        tokens = result.token_ids.tolist()
        expected = logprobs_of(
            case.model(),
            request.prompt_token_ids,
            tokens,
            request.sampling,
            lambda written: banned_tokens(sequences, written),
        )
        case.require_close(f"bad_words={[single, double]}, {shown(request)}", expected, result.logprobs)


def _text(case: Case, tokens: list[int]) -> str | None:
    """Return the text of tokens, or None if it has a space at its start or does not encode to the same tokens."""
    text = case.tokenizer.decode(tokens)
    assert isinstance(text, str), "one sequence gives one text"
    is_word = text.isprintable() and text == text.strip() and bool(text)
    return text if is_word and case.tokenizer.encode(text, add_special_tokens=False) == tokens else None


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
    """Yield stops that occur before a response's end, and the number of its tokens up to the stop.

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
    """Responses end at max_new_tokens and at the context's end, and a refusal names a request that cannot be served."""
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
    """An abort ends only its own request, which keeps the tokens sampled so far. Unknown ids are ignored."""
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


async def update(engine: Engine, case: Case) -> None:
    """After an update every response comes from the new weights and says so, without cached prompts of the old ones."""
    requests = [ask(prompt, seed=n, temperature=float(n % 2)) for n, prompt in enumerate(case.prompts)]
    await answers_of(engine, requests)
    for seed in (1, 2):
        received_nothing = await load(engine, case.model(seed), 10 + seed)
        require(not received_nothing, f"a complete update reports {received_nothing} as received nothing")
        for request, result in zip(requests, await answers_of(engine, requests), strict=True):
            spans = list(result.weight_versions)
            require(spans == [(0, 10 + seed)], f"weight_versions={spans} after an update to version {10 + seed}")
            case.compare(f"version {10 + seed}", case.model(seed), request, result)
    await load(engine, case.model(), 0)


async def update_in_flight(engine: Engine, case: Case) -> None:
    """Running responses continue with new weights. Each token has the version and log-probability of its weights."""
    old, new = case.model(1), case.model(2)
    requests = [
        ask(case.prompts[n], seed=n, max_new_tokens=LONG if n < 5 else 60, temperature=float(n % 2)) for n in (0, 3, 5)
    ]
    await load(engine, old, 7)

    async def change(_: list[str]) -> None:
        await load(engine, new, 8)

    async def restore() -> None:
        await load(engine, old, 7)

    _, results = await midway(
        engine,
        requests,
        change,
        lambda _, results: 0 < results[0].weight_versions[-1].start < LONG,
        restore,
    )
    for request, result in zip(requests, results, strict=True):
        check_spans(case, request, result, {7: old, 8: new})
    (after,) = await answers_of(engine, [ask(case.prompts[3], seed=3)])
    require(list(after.weight_versions) == [(0, 8)], f"weight_versions={after.weight_versions} after the update")
    await load(engine, case.model(), 0)


def check_spans(
    case: Case, request: GenerationRequest, result: GenerationResult, models: dict[int, PreTrainedModel]
) -> None:
    """Check that each span of a response was drawn from the model of its version, and from no other one.

    Raises:
        ContractError: a span's log-probabilities are not those of its version, given all earlier tokens.
    """
    tokens, spans = result.token_ids.tolist(), list(result.weight_versions)
    ends = [*(start for start, _ in spans[1:]), len(tokens)]
    for (first, version), end in zip(spans, ends, strict=True):
        prefix, span = [*request.prompt_token_ids, *tokens[:first]], tokens[first:end]
        require(version in models, f"version {version} of {spans} never reached the engine")
        if request.sampling.temperature == 0:
            likeliest = logits_of(models[version], prefix, span).argmax(-1).tolist()
            require(span == likeliest, f"tokens {first}..{end} are not the most likely ones of version {version}")
        for other, model in models.items():
            expected = logprobs_of(model, prefix, span, request.sampling)
            error = float((torch.tensor(result.logprobs[first:end]).double() - expected).abs().max())
            require(
                (error <= case.tolerance) == (other == version),
                f"tokens {first}..{end} of spans {spans}, {shown(request)}: log-probabilities differ by {error:.3g} "
                f"from version {other}",
            )


async def same_version(engine: Engine, case: Case) -> None:
    """An update to the version that the engine has, as after the death of another engine, changes no response."""
    requests = [ask(case.prompts[n], seed=n, max_new_tokens=LONG) for n in (0, 3)]
    await load(engine, case.model(1), 5)
    undisturbed = await answers_of(engine, requests)

    async def renew(ids: list[str]) -> None:
        await load(engine, case.model(1), 5)

    _, results = await midway(engine, requests, renew, lambda _, results: True)
    for one, other in zip(undisturbed, results, strict=True):
        require(same(one, other, case.tolerance), "an update to the same weights changes a running response")
        require(list(other.weight_versions) == [(0, 5)], f"weight_versions={other.weight_versions} of one version")
    await load(engine, case.model(), 0)


async def interrupted_update(engine: Engine, case: Case) -> None:
    """An interrupted update can be started again, and leaves none of its weights in the engine."""
    for most in (1, len(tensors_of(case.model(1))) // 2):
        await load(engine, case.model(1), 31, most=most)
        await load(engine, case.model(2), 32)
        request = ask(case.prompts[3], seed=3)
        (result,) = await answers_of(engine, [request])
        case.compare(f"after an update of {most} tensors and a complete one", case.model(2), request, result)
    await load(engine, case.model(), 0)


async def missing_tensor(engine: Engine, case: Case) -> None:
    """A tensor that is not sent is reported at the end of the update."""
    names = list(tensors_of(case.model()))
    for left_out in (names[len(names) // 2], names[-2]):
        reported = await load(engine, case.model(), 41, left_out=left_out)
        require(bool(reported), f"{left_out} was not sent, and the update reports nothing")
    await load(engine, case.model(), 0)


async def layer_outputs(engine: Engine, case: Case) -> None:
    """`layer_outputs` returns the hidden states after each decoder layer, or nothing."""
    outputs = await engine.layer_outputs(case.prompts[3])
    if not outputs:
        raise NotOffered("it returns no outputs of layers; a wrong layer cannot be named")
    model = case.model()
    with torch.no_grad(), recorded_outputs(decoder_layers(model)) as expected:
        model(torch.tensor([case.prompts[3]]), use_cache=False)
    for number, (output, right) in enumerate(zip(outputs, expected, strict=False)):
        error = float((output - right).norm() / right.norm())
        require(error <= 10 * case.tolerance, f"the output of layer {number} differs by {error:.3g} of its norm")


async def sleep(engine: Engine, case: Case) -> None:
    """After sleep and wake_up, each called twice, the engine answers as before."""
    requests = [ask(prompt, seed=n) for n, prompt in enumerate(case.prompts)]
    before = await answers_of(engine, requests)
    for call in (engine.sleep, engine.sleep, engine.wake_up, engine.wake_up):
        await call()
    for one, other in zip(before, await answers_of(engine, requests), strict=True):
        require(same(one, other, case.tolerance), "a response is another one after sleep")


async def death(engine: Engine, case: Case) -> None:
    """A broken engine ends running and later calls with an error of the library, and leaves no call without an end."""
    requests = [ask(case.prompts[n], seed=n, max_new_tokens=LONG) for n in (0, 3)]
    _, running = start(engine, requests)
    await asyncio.sleep(0.05)
    if case.kill is None:
        broken = model_of.__wrapped__(case.folder, 0)
        with torch.no_grad():
            for parameter in broken.parameters():
                parameter.fill_(torch.nan)
        await load(engine, broken, 99)
    else:
        case.kill()
    await _all_fail(running, "running")
    _, later = start(engine, requests[:1])
    await _all_fail(later, "later")


async def _all_fail(answers: Sequence["asyncio.Future[GenerationResult]"], which: str) -> None:
    for answer in answers:
        await asyncio.wait([answer])
        error = answer.exception()
        right = isinstance(error, NemoRLError) and not isinstance(error, ContractError) and str(error)
        require(bool(right), f"a {which} call of a broken engine gives {error!r}, and must raise an error of nemo_rl")
