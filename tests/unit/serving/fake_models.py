"""A small implementation of `AdapterModels`: a bigram model with adapters, which trains and samples really.

The logits after token t are `base[t] + (alpha / rank) * (A[:, t] @ B)`, so a new adapter (B = 0) has no effect.
Gradients and updates are computed by hand in float64.
"""

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from nemo_rl.models.adapters.tensors import AdapterShape
from nemo_rl.models.adapters.training import AdamParams
from nemo_rl.models.generation.interfaces import GenerationResult, SamplingParams, VersionSpan
from nemo_rl.serving.interfaces import (
    LossSpec,
    ModelLimits,
    PassResult,
    PromptScores,
    RequestError,
    ScoreRequest,
    TrainingDatum,
)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


class Adapter:
    def __init__(self, spec: AdapterShape, vocab: int) -> None:
        self.spec = spec
        rng = np.random.default_rng(spec.seed)
        self.a = rng.normal(size=(spec.rank, vocab))
        self.b = np.zeros((spec.rank, vocab))
        self.reset()

    def reset(self) -> None:
        self.grads = [np.zeros_like(self.a), np.zeros_like(self.b)]
        self.means = [np.zeros_like(self.a), np.zeros_like(self.b)]
        self.squares = [np.zeros_like(self.a), np.zeros_like(self.b)]
        self.steps = 0

    @property
    def delta(self) -> np.ndarray:
        return self.spec.alpha / self.spec.rank * self.a.T @ self.b


class FakeModels:
    """Args: delay_s is the time that each pass and each sequence takes; journal gets a line for each call."""

    def __init__(self, vocab: int = 32, max_context: int = 64, delay_s: float = 0.0, eos: int = 2) -> None:
        self.limits = ModelLimits(max_context=max_context, vocab_size=vocab, eos_ids=(eos,))
        self.base = np.random.default_rng(7).normal(size=(vocab, vocab))
        self.adapters: dict[str, Adapter] = {}
        self.samplers: dict[str, np.ndarray] = {}
        self.sampler_specs: dict[str, Adapter] = {}
        self.used: set[str] = set()
        self.calls: list[tuple[str, str]] = []
        self.delay_s = delay_s
        self.fail_next = 0
        self.on_call: Callable[[str], None] = lambda what: None

    async def _work(self, what: str, name: str) -> None:
        self.calls.append((what, name))
        self.on_call(what)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self.fail_next:
            self.fail_next -= 1
            raise RuntimeError("a rank has died")

    def _new(self, name: str, adapter: Adapter) -> None:
        assert name not in self.used, f"the name {name} is used again"
        self.used.add(name)
        self.adapters[name] = adapter

    async def create(self, adapter: str, spec: AdapterShape) -> None:
        await self._work("create", adapter)
        self._new(adapter, Adapter(spec, self.limits.vocab_size))

    async def run_pass(
        self, adapter: str, data: Sequence[TrainingDatum], loss: LossSpec, *, backward: bool
    ) -> PassResult:
        await self._work("backward" if backward else "forward", adapter)
        own = self.adapters[adapter]
        outputs, total = [], 0.0
        grad_logits = np.zeros_like(self.base)
        table = log_softmax(self.base + own.delta)
        for datum in data:
            targets = datum.inputs["target_tokens"]
            rows = table[datum.token_ids]  # [N, V]
            columns = targets if targets.ndim == 2 else targets[:, None]
            logprobs = np.take_along_axis(rows, columns, 1)
            value, slope = self._loss(loss, logprobs, datum, targets.ndim)
            total += value
            outputs.append({"logprobs": logprobs.reshape(targets.shape).astype(np.float32)})
            for place, token in enumerate(datum.token_ids):
                np.add.at(grad_logits[token], columns[place], slope[place])
                grad_logits[token] -= slope[place].sum() * np.exp(rows[place])
        if backward:
            scale = own.spec.alpha / own.spec.rank
            own.grads[0] += scale * own.b @ grad_logits.T
            own.grads[1] += scale * own.a @ grad_logits
        return PassResult(outputs, {"loss:sum": total})

    @staticmethod
    def _loss(loss: LossSpec, x: np.ndarray, datum: TrainingDatum, ndim: int) -> tuple[float, np.ndarray]:
        def column(name: str) -> np.ndarray:
            values = datum.inputs[name].astype(np.float64)
            return values if ndim == 2 else values[:, None]

        if loss.name == "cross_entropy":
            return float(-(column("weights") * x).sum()), -column("weights")
        ratio = np.exp(x - column("logprobs"))
        if loss.name == "importance_sampling":
            return float(-(ratio * column("advantages")).sum()), -ratio * column("advantages")
        raise RequestError(f"the fake has no loss {loss.name}")

    async def update(self, adapter: str, params: AdamParams) -> dict[str, float]:
        await self._work("update", adapter)
        own = self.adapters[adapter]
        own.steps += 1
        norm = float(np.sqrt(sum((grad**2).sum() for grad in own.grads)))
        scale = min(1.0, params.grad_clip_norm / (norm + 1e-6)) if params.grad_clip_norm > 0 else 1.0
        for values, grad, mean, square in zip((own.a, own.b), own.grads, own.means, own.squares, strict=True):
            values *= 1 - params.learning_rate * params.weight_decay
            mean *= params.beta1
            mean += (1 - params.beta1) * scale * grad
            square *= params.beta2
            square += (1 - params.beta2) * (scale * grad) ** 2
            top = mean / (1 - params.beta1**own.steps)
            values -= params.learning_rate * top / (np.sqrt(square / (1 - params.beta2**own.steps)) + params.eps)
            grad[:] = 0
        return {"grad_norm": norm}

    async def save(self, adapter: str, folder: Path, *, with_optimizer: bool) -> None:
        await self._work("save", adapter)
        self._write(self.adapters[adapter], folder, with_optimizer)

    @staticmethod
    def _write(own: Adapter, folder: Path, with_optimizer: bool) -> None:
        try:
            folder.mkdir()
            (folder / "adapter_config.json").write_text(json.dumps(asdict(own.spec)))
            np.savez(folder / "adapter.npz", a=own.a, b=own.b)
            if with_optimizer:
                moments = {f"m{number}": value for number, value in enumerate([*own.means, *own.squares])}
                np.savez(folder / "optimizer.npz", steps=own.steps, **moments)
        except OSError as error:  # as the ranks refuse
            shutil.rmtree(folder, ignore_errors=True)
            raise RequestError(f"{folder} cannot be written: {error}") from error

    @staticmethod
    def _read(folder: Path, vocab: int, with_optimizer: bool) -> Adapter:
        own = Adapter(AdapterShape(**json.loads((folder / "adapter_config.json").read_text())), vocab)
        stored = np.load(folder / "adapter.npz")
        own.a, own.b = stored["a"], stored["b"]
        if with_optimizer:
            moments = np.load(folder / "optimizer.npz")
            own.steps = int(moments["steps"])
            own.means, own.squares = [moments["m0"], moments["m1"]], [moments["m2"], moments["m3"]]
        return own

    async def load(self, adapter: str, folder: Path, *, with_optimizer: bool) -> AdapterShape:
        await self._work("load", adapter)
        own = self._read(folder, self.limits.vocab_size, with_optimizer)
        self._new(adapter, own)
        return own.spec

    async def drop(self, adapter: str) -> None:
        await self._work("drop", adapter)
        del self.adapters[adapter]

    def _new_sampler(self, name: str, own: Adapter) -> None:
        assert name not in self.used, f"the name {name} is used again"
        self.used.add(name)
        self.samplers[name] = log_softmax(self.base + own.delta)
        copy = Adapter(own.spec, self.limits.vocab_size)
        copy.a, copy.b = own.a.copy(), own.b.copy()
        self.sampler_specs[name] = copy

    async def publish(self, adapter: str, sampler: str) -> None:
        await self._work("publish", sampler)
        self._new_sampler(sampler, self.adapters[adapter])

    async def load_sampler(self, sampler: str, folder: Path) -> None:
        await self._work("load_sampler", sampler)
        self._new_sampler(sampler, self._read(folder, self.limits.vocab_size, False))

    async def save_sampler(self, sampler: str, folder: Path) -> None:
        await self._work("save_sampler", sampler)
        self._write(self.sampler_specs[sampler], folder, False)

    async def drop_sampler(self, sampler: str) -> None:
        await self._work("drop_sampler", sampler)
        del self.samplers[sampler], self.sampler_specs[sampler]

    def _table(self, sampler: str | None) -> np.ndarray:
        return log_softmax(self.base) if sampler is None else self.samplers[sampler]

    async def sample(
        self, sampler: str | None, prompt: Sequence[int], params: SamplingParams, seed: int
    ) -> GenerationResult:
        await self._work("sample", str(sampler))
        table, rng = self._table(sampler), np.random.default_rng(seed)
        ids, logprobs, last, reason = [], [], prompt[-1], "length"
        while len(ids) < params.max_new_tokens:
            row = table[last] if params.temperature == 0 else log_softmax(table[last] / params.temperature)
            if params.top_k is not None:
                row = log_softmax(np.where(row >= np.sort(row)[-params.top_k], row, -np.inf))
            last = int(row.argmax() if params.temperature == 0 else rng.choice(len(row), p=np.exp(row)))
            ids.append(last)
            logprobs.append(0.0 if params.temperature == 0 else row[last])
            text = "".join(map(self.text, ids))
            if last in params.stop_token_ids or any(stop in text for stop in params.stop_strings):
                reason = "stop"
                break
        span = [VersionSpan(0, 0)]
        return GenerationResult(np.array(ids, np.int32), np.array(logprobs, np.float32), reason, span)

    @staticmethod
    def text(token: int) -> str:
        """The text of a token: a letter, for tests of stops."""
        return chr(ord("a") + token % 26)

    async def score(self, sampler: str | None, prompt: Sequence[int], request: ScoreRequest) -> PromptScores:
        await self._work("score", str(sampler))
        table, length = self._table(sampler), len(prompt)
        logprobs = np.full(length, np.nan, np.float32)
        logprobs[1:] = [table[before, token] for before, token in zip(prompt, prompt[1:], strict=False)]
        scores = PromptScores(logprobs)
        if request.top_k:
            ids = np.zeros((length, request.top_k), np.int32)
            top = np.full((length, request.top_k), -99999.0, np.float32)
            for place in range(1, length):
                ids[place] = np.argsort(-table[prompt[place - 1]], kind="stable")[: request.top_k]
                top[place] = table[prompt[place - 1]][ids[place]]
            scores = replace(scores, top_ids=ids, top_logprobs=top)
        if request.targets is not None:
            found = np.full(request.targets.shape, np.nan, np.float32)
            for place, row in enumerate(request.targets):
                for column, token in enumerate(row):
                    if token >= 0:
                        found[place, column] = table[prompt[place], token]
            scores = replace(scores, target_logprobs=found)
        return scores
