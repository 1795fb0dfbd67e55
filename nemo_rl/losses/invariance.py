"""Check properties of built-in and user-defined losses, for test suites.

Invariant: the loss of a global batch and its gradient must not depend on how the batch was divided into microbatches
and ranks, on the order of its rows, or on padding.

Example:
    >>> def test_my_loss():
    ...     check_invariance(MyLossFn(), next_token_logprobs, data)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl.losses.loss_function import LossData, LossFunction, extreme_of

EXTRA_PADDING = 3
"""Number of columns of random values that the padding check appends."""


@dataclass(frozen=True)
class _Result:
    """Loss, gradient in the original order and layout of rows, and reduced metrics."""

    loss: Tensor
    gradient: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class _Batch:
    """A batch in float64, with the denominators of its global batch."""

    model_output: Tensor
    data: dict[str, object]
    global_valid_seqs: Tensor
    global_valid_toks: Tensor

    @property
    def num_rows(self) -> int:
        return self.model_output.shape[0]


def check_invariance(
    loss_fn: LossFunction,
    model_output: Tensor,
    data: LossData,
    *,
    rows_per_unit: int = 1,
    tolerance: float = 1e-9,
    seed: int = 0,
) -> None:
    """Assert that loss, gradient and metrics do not depend on how the batch is divided and ordered.

    Everything is computed in float64. The regroupings are: each way to cut the rows into consecutive microbatches of
    equal size, one uneven cut, contiguous and round-robin shards with two microbatches each, shuffled rows, and right
    padding filled with random values. Metrics are summed, or reduced as extremes (`loss_function.extreme_of`).

    Args:
        model_output: First argument of the loss: `[B, T-1]` log-probabilities, `[B, T-1, ...]` logits, or scores `[B]`,
            `[B, 1]`.
        data: Tensors with first axis `B`. Tensors of shape `[B, T, ...]` are per token.
        rows_per_unit: Number of consecutive rows that must stay together (2 for chosen/rejected pairs).
        tolerance: Relative and absolute tolerance.
        seed: Seed of the shuffles and of the random values.

    Raises:
        AssertionError: A quantity changed. The message names the regrouping, the quantity and both values.
    """
    batch = _as_float64(model_output, data)
    generator = torch.Generator().manual_seed(seed)
    whole = _evaluate(loss_fn, batch, [list(range(batch.num_rows))])
    for name, groups in _groupings(batch.num_rows, rows_per_unit, generator):
        _compare(name, whole, _evaluate(loss_fn, batch, groups), tolerance)
    if _is_per_token(batch):
        padded = _evaluate(loss_fn, _pad(batch, generator), [list(range(batch.num_rows))])
        _compare(f"{EXTRA_PADDING} columns of padding", whole, padded, tolerance)


def _as_float64(model_output: Tensor, data: LossData) -> _Batch:
    converted = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in data.items()
    }
    sample_mask_B = data["sample_mask"].double()
    num_tokens = torch.zeros((), dtype=torch.float64)
    if "token_mask" in data:
        num_tokens = (data["token_mask"][:, 1:].double() * sample_mask_B[:, None]).sum()
    return _Batch(model_output.detach().double(), converted, sample_mask_B.sum(), num_tokens)


def _groupings(num_rows: int, rows_per_unit: int, generator: torch.Generator) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield the name of each regrouping, with its microbatches as lists of row indices. Each row occurs once."""
    units = [list(range(i, i + rows_per_unit)) for i in range(0, num_rows, rows_per_unit)]
    num_units = len(units)
    for size in range(1, num_units):
        if num_units % size == 0:
            yield f"microbatches of {size * rows_per_unit} rows", _cut(units, size)
    if num_units > 1:
        cut = 1 + num_units // 3
        yield (
            f"an uneven split at row {cut * rows_per_unit}",
            [
                _flatten(units[:cut]),
                _flatten(units[cut:]),
            ],
        )
        middle = (num_units + 1) // 2
        for name, shards in {
            "contiguous": [units[:middle], units[middle:]],
            "round-robin": [units[0::2], units[1::2]],
        }.items():
            groups = [g for shard in shards for g in _cut(shard, (len(shard) + 1) // 2)]
            yield f"two {name} shards", groups
    shuffled = [units[i] for i in torch.randperm(num_units, generator=generator).tolist()]
    yield f"row order {_flatten(shuffled)}", [_flatten(shuffled)]
    yield "shuffled microbatches", _cut(shuffled, (num_units + 1) // 2)


def _cut(units: Sequence[list[int]], size: int) -> list[list[int]]:
    return [_flatten(units[i : i + size]) for i in range(0, len(units), size)]


def _flatten(units: Sequence[list[int]]) -> list[int]:
    return [row for unit in units for row in unit]


def _evaluate(loss_fn: LossFunction, batch: _Batch, groups: list[list[int]]) -> _Result:
    """Accumulate loss and gradient over the groups, as a worker does over microbatches."""
    model_output = batch.model_output.clone().requires_grad_(True)
    total = torch.zeros((), dtype=torch.float64)
    metrics: dict[str, Tensor] = {}
    for rows in groups:
        loss, part = loss_fn(
            model_output[rows],
            data=_select(batch.data, rows),
            global_valid_seqs=batch.global_valid_seqs,
            global_valid_toks=batch.global_valid_toks,
        )
        loss.backward()
        total = total + loss.detach()
        for name, value in part.items():
            _reduce_into(metrics, name, torch.as_tensor(value, dtype=torch.float64).detach())
    assert model_output.grad is not None
    return _Result(total, model_output.grad, metrics)


def _select(data: dict[str, object], rows: list[int]) -> dict[str, object]:
    return {
        name: value[rows]
        if isinstance(value, Tensor)
        else [value[row] for row in rows]
        if isinstance(value, list)
        else value
        for name, value in data.items()
    }


def _reduce_into(metrics: dict[str, Tensor], name: str, value: Tensor) -> None:
    if name not in metrics:
        metrics[name] = value
    elif extreme := extreme_of(name):
        metrics[name] = torch.as_tensor(extreme([float(metrics[name]), float(value)]), dtype=torch.float64)
    else:
        metrics[name] = metrics[name] + value


def _is_per_token(batch: _Batch) -> bool:
    return batch.model_output.ndim >= 2 and "token_mask" in batch.data


def _pad(batch: _Batch, generator: torch.Generator) -> _Batch:
    """Append columns whose tokens do not count, with mask 0 and random values elsewhere."""
    num_tokens = batch.model_output.shape[1] + 1

    def widen(name: str, value: object) -> object:
        if not (isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == num_tokens):
            return value
        shape = (value.shape[0], EXTRA_PADDING, *value.shape[2:])
        if name == "token_mask":
            extra = torch.zeros(shape)
        elif value.is_floating_point():
            extra = 5 * torch.randn(shape, generator=generator, dtype=torch.float64)
        else:
            extra = torch.randint(0, 2, shape, generator=generator)
        return torch.cat([value, extra.to(value.dtype)], dim=1)

    shape = (batch.num_rows, EXTRA_PADDING, *batch.model_output.shape[2:])
    garbage = -5 * torch.rand(shape, generator=generator, dtype=torch.float64)
    return _Batch(
        torch.cat([batch.model_output, garbage], dim=1),
        {name: widen(name, value) for name, value in batch.data.items()},
        batch.global_valid_seqs,
        batch.global_valid_toks,
    )


def _compare(name: str, expected: _Result, actual: _Result, tolerance: float) -> None:
    width = expected.gradient.shape[1:]
    gradient = actual.gradient[:, : width[0]] if width else actual.gradient
    _assert_close(f"loss with {name}", expected.loss, actual.loss, tolerance)
    _assert_close(f"gradient with {name}", expected.gradient, gradient, tolerance)
    if width:
        beyond = actual.gradient[:, width[0] :]
        _assert_close(f"gradient on {name}", torch.zeros_like(beyond), beyond, tolerance)
    if expected.metrics.keys() != actual.metrics.keys():
        raise AssertionError(f"metrics with {name}: {sorted(expected.metrics)} became {sorted(actual.metrics)}.")
    for metric, value in expected.metrics.items():
        _assert_close(f"metric {metric} with {name}", value, actual.metrics[metric], tolerance)


def _assert_close(what: str, expected: Tensor, actual: Tensor, tolerance: float) -> None:
    if torch.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=False):
        return
    difference = (actual - expected).abs().nan_to_num(nan=torch.inf)
    index = int(difference.argmax())
    raise AssertionError(
        f"{what} changes: {expected.flatten()[index].item():.12g} for the whole batch, "
        f"{actual.flatten()[index].item():.12g} regrouped (entry {index} of {expected.numel()}, "
        f"tolerance {tolerance:g}). A loss must divide by global_valid_seqs or global_valid_toks "
        "and must not mix rows or read masked tokens."
    )
