"""Properties of what is drawn: tokens, log-probabilities, filters, the distribution of samples, seeds."""

import itertools
import math
from collections import Counter

from nemo_rl.commands.conformance.case import Case, answers_of, ask, require, same, shown
from nemo_rl.commands.conformance.references import distribution, logits_of, logprobs_of
from nemo_rl.models.generation.decoding.sampling import bad_word_ids, banned_tokens
from nemo_rl.models.generation.interfaces import Engine, SamplingParams

_SAMPLES = 400
_EXPECTED = 5.0
"""Expected count from which on a token has a bin of its own in the chi-square statistic."""
_QUANTILE = 4.0
"""In standard deviations of a normal distribution: a right engine exceeds it with a probability of 3e-5."""


async def greedy(engine: Engine, case: Case) -> None:
    """At temperature 0 the most likely token is taken, and its log-probability is the model's."""
    requests = [ask(prompt, temperature=0.0) for prompt in case.prompts]
    for request, result in zip(requests, await answers_of(engine, requests), strict=True):
        tokens = result.token_ids.tolist()
        likeliest = logits_of(case.model(), request.prompt_token_ids, tokens).argmax(-1).tolist()
        require(tokens == likeliest, f"{shown(request)}: tokens {tokens}, the most likely ones are {likeliest}")
        require(len(tokens) == 12, f"{len(tokens)} tokens instead of 12")
        case.compare("greedy", case.model(), request, result)


async def logprobs(engine: Engine, case: Case) -> None:
    """Log-probabilities are those of the model's distribution at the request's temperature."""
    await _compare(engine, case, [{"temperature": temperature} for temperature in (1.0, 0.6, 1.7)])


async def filters(engine: Engine, case: Case) -> None:
    """top_k and top_p exclude tokens, and log-probabilities are those of the distribution that remains."""
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
    """A seed fixes a response, whatever else runs and in which order; other seeds give other responses."""
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
    """Return the text of tokens, if it has no space at its start and encodes to them again."""
    text = case.tokenizer.decode(tokens)
    assert isinstance(text, str), "one sequence gives one text"
    is_word = text.isprintable() and text == text.strip() and bool(text)
    return text if is_word and case.tokenizer.encode(text, add_special_tokens=False) == tokens else None
