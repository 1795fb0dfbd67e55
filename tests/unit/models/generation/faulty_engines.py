"""Engines that break one property of the contract each, for tests of the conformance suite."""

import os
from collections.abc import Callable, Collection, Sequence
from unittest import mock

import torch

from nemo_rl.models.generation import rows
from nemo_rl.models.generation.draws import Distribution, Drawn, filtered_logprobs
from nemo_rl.models.generation.draws import draw as _draw
from nemo_rl.models.generation.hf import HfEngine
from nemo_rl.models.generation.interfaces import EngineSettings, GenerationRequest, VersionSpan
from nemo_rl.models.generation.stepped import Finished
from nemo_rl.utils.errors import GenerationError


def scored(logits: torch.Tensor, drawn: Sequence[Drawn], distribution: Distribution) -> list[Drawn]:
    """Return drawn tokens with their log-probabilities in another distribution."""
    logprobs = filtered_logprobs(logits, distribution)
    return [Drawn(each.token, float(row[each.token])) for each, row in zip(drawn, logprobs, strict=True)]


class TakesTheSecond(HfEngine):
    """At temperature 0 it takes the second likeliest token."""

    def step(self) -> list[Finished]:
        def second(logits: torch.Tensor, params: Distribution, generators: list[torch.Generator]) -> list[Drawn]:
            if params.temperature:
                return _draw(logits, params, generators)
            tokens = logits.topk(2).indices[:, 1].tolist()
            return scored(logits, [Drawn(token, 0.0) for token in tokens], Distribution(1.0))

        with mock.patch.object(rows, "draw", second):
            return super().step()


class BreaksInAStep(HfEngine):
    """A step of it fails."""

    def step(self) -> list[Finished]:
        raise ZeroDivisionError("a step of the engine")


class ReportsRaw(HfEngine):
    """It reports log-probabilities without the temperature."""

    changed: tuple[str, ...] = ("temperature",)

    def step(self) -> list[Finished]:
        def raw(logits: torch.Tensor, params: Distribution, generators: list[torch.Generator]) -> list[Drawn]:
            plain = {"temperature": 1.0, "top_k": None, "top_p": 1.0, "banned": ()}
            changed = {name: plain[name] for name in (*self.changed, "banned")}
            return scored(logits, _draw(logits, params, generators), params._replace(**changed))

        with mock.patch.object(rows, "draw", raw):
            return super().step()


class ReportsUnfiltered(ReportsRaw):
    """It reports log-probabilities before top-k and top-p."""

    changed = ("top_k", "top_p")


class DrawsTooSharply(HfEngine):
    """It draws from a sharper distribution than the one whose log-probabilities it reports."""

    def step(self) -> list[Finished]:
        def sharp(logits: torch.Tensor, params: Distribution, generators: list[torch.Generator]) -> list[Drawn]:
            return scored(logits, _draw(logits * 1.5, params, generators), params._replace(banned=()))

        with mock.patch.object(rows, "draw", sharp):
            return super().step()


class IgnoresSeeds(HfEngine):
    """Its requests share one random generator."""

    def add_request(self, request_id: str, request: GenerationRequest) -> None:
        super().add_request(request_id, request)
        self._waiting[-1].generator = torch.default_generator


class AllowsBadWords(HfEngine):
    """It ignores bad words."""

    def add_request(self, request_id: str, request: GenerationRequest) -> None:
        super().add_request(request_id, request)
        self._waiting[-1].bad_words = []


class IgnoresStopStrings(HfEngine):
    """It ignores stop strings."""

    def _hits_stop_string(self, row: object) -> bool:
        return False


class AlwaysStopsAtItsEnd(HfEngine):
    """The end of sequence ends a response even if it is no stop."""

    def _hits_stop_string(self, row: object) -> bool:
        return row.token_ids[-1] == self._tokenizer.eos_token_id or super()._hits_stop_string(row)


class ShowsSpecialTokens(HfEngine):
    """Its texts have special tokens."""

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids)


class WritesOneMore(HfEngine):
    """It writes one token too many."""

    def add_request(self, request_id: str, request: GenerationRequest) -> None:
        super().add_request(request_id, request)
        self._waiting[-1].most_tokens += 1


class RaisesAtOnce(HfEngine):
    """It raises an error of another kind, at once, for prompts that it cannot read."""

    def add_request(self, request_id: str, request: GenerationRequest) -> None:
        try:
            super().add_request(request_id, request)
        except GenerationError as error:
            raise ValueError(str(error)) from error


class LosesAborted(HfEngine):
    """An aborted request comes back without its tokens."""

    def remove_requests(self, request_ids: Collection[str]) -> list[Finished]:
        return [Finished(done.request_id, [], [], "abort") for done in super().remove_requests(request_ids)]


class IsDeafWhileItSteps(HfEngine):
    """It gives no call a turn between two steps."""

    async def _let_calls_begin(self) -> None:
        pass


class ReversesTheFirst(HfEngine):
    """It reports the tokens so far in the wrong order."""

    def sampled_so_far(self, request_id: str) -> tuple[list[int], list[float]]:
        tokens, logprobs = super().sampled_so_far(request_id)
        return tokens[::-1], logprobs[::-1]


class SkipsATensor(HfEngine):
    """It never loads the last norm, and does not say so."""

    async def load_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        own = {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}
        await super().load_tensors([(n, own[n] if n == "model.norm.weight" else t) for n, t in tensors])


class HidesTheVersion(HfEngine):
    """It notes no new version for running responses."""

    def _note_version(self, versions: list[VersionSpan], num_tokens: int) -> None:
        pass


class KeepsItsCache(HfEngine):
    """Running responses continue with keys and values of older weights."""

    def finish_loading(self, *, changed: bool) -> list[str]:
        return super().finish_loading(changed=False)


class BeginsAgain(HfEngine):
    """Running responses draw from the beginning of their seeds after each update."""

    def finish_loading(self, *, changed: bool) -> list[str]:
        for row in self._active:
            row.generator.manual_seed(row.request.seed)
        return super().finish_loading(changed=changed)


class KeepsWhatCameFirst(HfEngine):
    """A tensor of an interrupted update is not loaded again."""

    _first: dict[str, torch.Tensor] = {}

    async def load_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        first = [(name, self._first.setdefault(name, tensor.clone())) for name, tensor in tensors]
        await super().load_tensors(first)

    def finish_loading(self, *, changed: bool) -> list[str]:
        self._first = {}
        return super().finish_loading(changed=changed)


class ReportsNothingMissing(HfEngine):
    """It does not report parameters that received nothing."""

    def put_in_force(self) -> list[str]:
        super().put_in_force()
        return []


class DoublesOutputs(HfEngine):
    """Its outputs of layers are twice as large."""

    async def layer_outputs(self, token_ids: list[int]) -> list[torch.Tensor]:
        return [2 * output for output in await super().layer_outputs(token_ids)]


class WakesUpConfused(HfEngine):
    """Its weights are other ones after sleep."""

    async def wake_up(self) -> None:
        with torch.no_grad():
            self._model.model.norm.weight.mul_(1.1)
        await super().wake_up()


class HangsWhenItBreaks(HfEngine):
    """Its calls never end if a step fails."""

    def _pass_on_failure(self, steps: object) -> None:
        pass


class DiesInItsProcess(HfEngine):
    """Its process ends at the first request."""

    def add_request(self, request_id: str, request: GenerationRequest) -> None:
        os._exit(1)


FAULTS: list[tuple[str, Callable[[EngineSettings], HfEngine], str]] = [
    ("greedy", TakesTheSecond, "the most likely ones"),
    ("greedy", BreaksInAStep, "raised ZeroDivisionError: a step of the engine"),
    ("logprobs", ReportsRaw, "differ"),
    ("filters", ReportsUnfiltered, "differ"),
    ("samples", DrawsTooSharply, "chi-square"),
    ("seeds", IgnoresSeeds, "another response"),
    ("bad_words", AllowsBadWords, "excludes"),
    ("stops", IgnoresStopStrings, "stop_strings"),
    ("stops", AlwaysStopsAtItsEnd, "without being a stop"),
    ("stops", ShowsSpecialTokens, "text"),
    ("limits", WritesOneMore, "due are"),
    ("limits", RaisesAtOnce, "generate raises ValueError"),
    ("aborts", LosesAborted, "no call showed its effect"),
    ("aborts", IsDeafWhileItSteps, "no call showed its effect"),
    ("so_far", ReversesTheFirst, "first tokens"),
    ("update", SkipsATensor, "differ"),
    ("update_in_flight", HidesTheVersion, "no call showed its effect"),
    ("update_in_flight", KeepsItsCache, "of version 8"),
    ("same_version", BeginsAgain, "changes a running response"),
    ("interrupted_update", KeepsWhatCameFirst, "differ"),
    ("missing_tensor", ReportsNothingMissing, "reports nothing"),
    ("layer_outputs", DoublesOutputs, "output of layer 0"),
    ("sleep", WakesUpConfused, "after sleep"),
    ("death", HangsWhenItBreaks, "no end within"),
]
"""A property, an engine that breaks it, and words of the violation."""
