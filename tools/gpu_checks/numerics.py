"""Compare the policy's log-probabilities and gradients with Hugging Face in float64; check LoRA.

The tolerance in half precision depends on the error of Hugging Face's own unpadded forward pass in that precision.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from gpu_checks.bench import Bench, Rows, packed, policy_config, random_rows, scores, update, weights_of
from gpu_checks.report import Figures, Finding
from gpu_checks.shapes import TINY, TINY_ON_CPU

LENGTHS = [24, 9, 17, 3, 24, 12]
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": packed(64),
    "recomputed": packed(64) | {"dtensor_cfg": {"activation_checkpointing": True}},
}
_TIMES_OWN = 2.0
"""Allowed ratio of the error in half precision to Hugging Face's own error."""
_LOGPROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.02}
_GRADIENT_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.02}
SGD = {"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}}


def against_hugging_face(bench: Bench) -> Iterator[Finding]:
    """Check scores and gradients of tiny models: padded, packed, and with activation checkpointing."""
    rows = random_rows(LENGTHS)
    for precision in ("float32", "bfloat16"):
        for shape in TINY if bench.on_gpu else TINY_ON_CPU:
            want, want_gradients, allowed, allowed_gradients = exact(bench, shape, rows, precision)
            errors, gradient_errors = {}, {}
            for layout, keys in LAYOUTS.items():
                got, gradients = scores_and_gradients(bench, shape, rows, precision=precision, **keys)
                errors[layout] = _largest(got - want)
                gradient_errors[layout] = worst_relative(gradients, want_gradients)
            yield _within(f"log-probs, {shape}, {precision}", errors, allowed)
            yield _within(f"gradients, {shape}, {precision}", gradient_errors, allowed_gradients)


def exact(bench: Bench, shape: str, rows: Rows, precision: str) -> tuple[Tensor, dict[str, Tensor], float, float]:
    """Return log-probs and gradients of Hugging Face in float64, and the allowed errors of each in a precision."""
    model = _reference(bench, shape)
    want, want_gradients = _scores_of(model, rows), _gradients_of(model, rows)
    allowed, allowed_gradients = _LOGPROB_TOLERANCE[precision], _GRADIENT_TOLERANCE[precision]
    if precision == "bfloat16":
        own = _reference(bench, shape, torch.bfloat16)
        allowed += _TIMES_OWN * _largest(_scores_of(own, rows) - want)
        allowed_gradients += _TIMES_OWN * worst_relative(_gradients_of(own, rows), want_gradients)
    return want, want_gradients, allowed, allowed_gradients


def compiled(bench: Bench) -> Iterator[Finding]:
    """Check compiled layers like uncompiled ones; CPUs, which compile for half a minute, check one model."""
    rows = random_rows(LENGTHS)
    for precision in ("float32", "bfloat16") if bench.on_gpu else ("float32",):
        for shape in TINY if bench.on_gpu else TINY_ON_CPU[:1]:
            want, want_gradients, allowed, allowed_gradients = exact(bench, shape, rows, precision)
            errors, gradient_errors = {}, {}
            for layout in ("packed", "recomputed"):
                keys: dict[str, Any] = {"precision": precision, **LAYOUTS[layout]}
                keys["dtensor_cfg"] = {**keys.get("dtensor_cfg", {}), "compile_layers": True}
                got, gradients = scores_and_gradients(bench, shape, rows, **keys)
                errors[layout] = _largest(got - want)
                gradient_errors[layout] = worst_relative(gradients, want_gradients)
            yield _within(f"log-probs, {shape}, {precision}", errors, allowed)
            yield _within(f"gradients, {shape}, {precision}", gradient_errors, allowed_gradients)


def at_full_size(bench: Bench) -> Iterator[Finding]:
    """Check packed bfloat16 scores of the model whose speed is measured; Hugging Face in float32 is the reference."""
    keys: dict[str, Any] = {"precision": "bfloat16", **packed(256)}
    rows = random_rows([128, 50, 200, 31])
    want = _scores_of(_reference(bench, bench.large, torch.float32), rows)
    own = _scores_of(_reference(bench, bench.large, torch.bfloat16), rows)
    bench.empty_cache()
    allowed = _LOGPROB_TOLERANCE["bfloat16"] + _TIMES_OWN * _largest(own - want)
    got = scores(bench.large_policy(), policy_config(bench.folder(bench.large), **keys), rows)
    yield _within(f"log-probs, {bench.large}, bfloat16", {"packed": _largest(got - want)}, allowed)


def lora(bench: Bench) -> Iterator[Finding]:
    """Check that adapters learn, the base does not change, and exported merged weights score like the adapted model."""
    rows = random_rows(LENGTHS)
    for precision in ("float32", "bfloat16"):
        adapters = {"lora_cfg": {"enabled": True, "dim": 8, "alpha": 16}}
        keys = {"precision": precision, "dtensor_cfg": adapters, **packed(64)}
        config = policy_config(bench.folder("qwen2"), **keys)
        rank = bench.policy("qwen2", **keys)
        before = scores(rank, config, rows)
        losses = [update(rank, config, rows).loss for _ in range(4)]
        after = scores(rank, config, rows)
        base_moved = _largest(scores(rank, config, rows, reference=True) - before)
        merged = _reference(bench, "qwen2")
        _load(merged, weights_of(rank))
        allowed = _LOGPROB_TOLERANCE[precision]
        if precision == "bfloat16":
            allowed += _TIMES_OWN * _largest(before - _scores_of(_reference(bench, "qwen2", as_trained=True), rows))
        error = _largest(after - _scores_of(merged, rows))
        problem = "" if losses[-1] < losses[0] else "the loss did not fall. "
        problem += "" if base_moved <= 1e-6 else "the reference is no longer the base model. "
        problem += "" if error <= allowed else "the merged weights score differently."
        figures: Figures = {"loss_0": losses[0], "loss_3": losses[-1], "base_moved": base_moved, "merged_error": error}
        yield Finding(precision, figures | {"allowed": allowed}, problem.strip())


def _reference(
    bench: Bench, shape: str, dtype: torch.dtype = torch.float64, *, as_trained: bool = False
) -> PreTrainedModel:
    """Load the plain Hugging Face model, in float64 on the CPU or in another precision on the device."""
    folder = bench.folder(shape, as_trained=as_trained)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.to("cpu" if dtype == torch.float64 else bench.device).eval()


def _row_logprobs(model: PreTrainedModel, rows: Rows) -> Iterator[Tensor]:
    """Yield `[T_row - 1]` log-probabilities of each row from the model's own logits, unpadded, on the CPU."""
    for ids_T, length in zip(rows["input_ids"], rows["input_lengths"].tolist(), strict=True):
        ids_1T = ids_T[None, :length].to(model.device)
        logprobs_TV = model(input_ids=ids_1T, use_cache=False).logits[0, :-1].double().log_softmax(-1)
        yield logprobs_TV.gather(-1, ids_1T[0, 1:, None])[:, 0].cpu()


@torch.no_grad()
def _scores_of(model: PreTrainedModel, rows: Rows) -> Tensor:
    """Return `[B, T]` float64 log-probabilities, aligned as in `PolicyWorker.get_logprobs`."""
    out_BT = torch.zeros(rows["input_ids"].shape, dtype=torch.float64)
    for row, logprobs_T in enumerate(_row_logprobs(model, rows)):
        out_BT[row, 1 : len(logprobs_T) + 1] = logprobs_T
    return out_BT


def _gradients_of(model: PreTrainedModel, rows: Rows) -> dict[str, Tensor]:
    """Return the gradient of the mean negative log-likelihood by weight, float64 on the CPU."""
    masks = [mask[1:length].double() for mask, length in zip(rows["token_mask"], rows["input_lengths"], strict=True)]
    total = sum(-(row * mask).sum() for row, mask in zip(_row_logprobs(model, rows), masks, strict=True))
    assert isinstance(total, Tensor)
    (total / sum(mask.sum() for mask in masks)).backward()
    return {name: weight.grad.double().cpu() for name, weight in model.named_parameters() if weight.grad is not None}


def scores_and_gradients(bench: Bench, shape: str, rows: Rows, **keys: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the policy's scores, and the decrease of each weight in one step of gradient descent at rate 1."""
    config = policy_config(bench.folder(shape), **keys)
    rank = bench.policy(shape, optimizer=SGD, **keys)
    scored, before = scores(rank, config, rows), weights_of(rank)
    update(rank, config, rows)
    after = weights_of(rank)
    return scored, {name: before[name].double() - after[name].double() for name in before}


def worst_relative(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Return the largest error of a weight's gradient, relative to its norm plus 1 % of the whole gradient's norm."""
    if not got.keys() >= want.keys():
        raise AssertionError(f"no gradient arrived for {sorted(want.keys() - got.keys())}")
    whole = torch.stack([gradient.norm() for gradient in want.values()]).norm()
    errors = [(got[name] - gradient).norm() / (gradient.norm() + 0.01 * whole) for name, gradient in want.items()]
    return float(torch.stack(errors).max())


@torch.no_grad()
def _load(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())


def _within(name: str, errors: dict[str, float], allowed: float) -> Finding:
    wrong = [layout for layout, error in errors.items() if not error <= allowed]
    problem = f"{', '.join(wrong)}: farther from Hugging Face than allowed" if wrong else ""
    return Finding(name, {**errors, "allowed": allowed}, problem)
