"""Properties of new weights, of sleep, and of an engine that breaks."""

import asyncio
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from nemo_rl.commands.conformance.case import (
    LONG,
    Case,
    ContractError,
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
from nemo_rl.commands.conformance.references import logits_of, logprobs_of, model_of, tensors_of
from nemo_rl.models.generation.interfaces import Engine, GenerationRequest, GenerationResult
from nemo_rl.models.huggingface.layers import decoder_layers, recorded_outputs
from nemo_rl.utils.errors import NemoRLError


async def update(engine: Engine, case: Case) -> None:
    """After an update every response is that of the new weights, and says so; cached prompts are void."""
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
    """Running responses go on with new weights; each token has the version and log-probability of what drew it."""
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
    """An update that was interrupted can be started again, and leaves nothing of its weights."""
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
    """An engine that breaks ends running and later calls with an error of the library; none hangs."""
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
