"""Compute functions of recurrent layers on a row whose sequences share tokens, such as the prompt of several answers.

    sequences p a b, p a c, p d  ─►  row of parts p, a, b, c, d  (`models.training.shared_prefixes`)

    convolution   each part after the last tokens before it in its sequences, as many as the kernel reads
    scan          p from zeros; a and d from the state after p; b and c from the state after a

Parts of one depth are computed together, as batches. Invariant: outputs equal those of whole sequences up to rounding,
and so do gradients: that of a state is the sum over all parts that begin with it.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nemo_rl.utils.errors import ConfigError

_SHARE, _PADDING = 4, 64
"""A sequence joins a group if it is at most a quarter, or 64 tokens, shorter than the longest sequence of the group.
Most functions compute chunks of 64 tokens."""


def of_similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Group the indices of sequences that are padded to one length, longest first."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    groups: list[list[int]] = []
    for index in order:
        longest = lengths[groups[-1][0]] if groups else 0
        if not groups or longest - lengths[index] > max(longest // _SHARE, _PADDING):
            groups.append([])
        groups[-1].append(index)
    return groups


@dataclass(frozen=True)
class StateNames:
    """Arguments of a function that carries a state."""

    initial: str
    """Name of the states before the first token, `[S, ...]`."""
    final: str
    """Name of the flag with which the states after the last token are returned too."""
    is_pair: bool
    """Whether the function returns a pair also without the flag."""


@dataclass(frozen=True)
class PartBatch:
    """Parts that are computed together."""

    parts: tuple[int, ...]
    tokens: Tensor
    """Index in the row of each token, `[S, L]` int64. On padding, it is the number of tokens of the row."""


@dataclass(frozen=True)
class PartBatches:
    """All parts of a row, each after the same number of tokens before it."""

    batches: list[PartBatch]
    order: Tensor
    """Index of each token of the row in the concatenated batches without the tokens before the parts, `[T]` int64."""
    before: int
    """Number of tokens before each part."""

    def row(self, outputs: Sequence[Tensor], axis: int) -> Tensor:
        """Return the row `[1, ...]` of outputs `[S, ...]` for the batches. Their tokens are on an axis."""
        own = [output.narrow(axis, self.before, output.shape[axis] - self.before) for output in outputs]
        flat = torch.cat([output.movedim(axis, 1).flatten(0, 1) for output in own])
        return flat[self.order][None].movedim(1, axis)


class PrefixTree:
    """The parts of a row.

    Args:
        lengths: number of tokens of each part, at least 1, in the order of the row.
        parents: for each part, the part before it in its sequences. None if sequences begin with it.
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int | None]) -> None:
        self.parents = list(parents)
        self._lengths, self._starts = list(lengths), list(accumulate(lengths, initial=0))
        self._known: dict[tuple[int | None, torch.device], PartBatches] = {}

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the row."""
        return self._starts[-1]

    def after_tokens(self, before: int, device: torch.device) -> PartBatches:
        """Return batches of parts that begin with up to `before` earlier tokens, or else padding."""
        if (before, device) not in self._known:
            groups = of_similar_lengths(self._lengths)
            self._known[before, device] = self._batches(groups, before, device)
        return self._known[before, device]

    def by_depth(self, device: torch.device) -> PartBatches:
        """Return batches in an order in which every part follows its parent.

        Only parts that no other part follows are padded, so the states at the ends of others are right.
        """
        if (None, device) not in self._known:
            self._known[None, device] = self._batches(list(self._levels()), 0, device)
        return self._known[None, device]

    def _levels(self) -> Iterator[list[int]]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent is None else depths[parent] + 1)
        inner = {parent for parent in self.parents if parent is not None}
        for depth in range(max(depths) + 1):
            parts = [part for part, own in enumerate(depths) if own == depth]
            for length in sorted({self._lengths[part] for part in parts if part in inner}):
                yield [part for part in parts if part in inner and self._lengths[part] == length]
            leaves = [part for part in parts if part not in inner]
            for group in of_similar_lengths([self._lengths[part] for part in leaves]):
                yield [leaves[index] for index in group]

    def _batches(self, groups: Sequence[Sequence[int]], before: int, device: torch.device) -> PartBatches:
        batches, padding = [], self.num_tokens
        for parts in groups:
            rows = [torch.tensor([*self._before(part, before), *self._own(part)]) for part in parts]
            batches.append(PartBatch(tuple(parts), pad_sequence(rows, batch_first=True, padding_value=padding)))
        flat = torch.cat([batch.tokens[:, before:].flatten() for batch in batches])
        order = torch.empty(padding + 1, dtype=torch.int64).scatter_(0, flat, torch.arange(len(flat)))[:padding]
        there = [PartBatch(batch.parts, batch.tokens.to(device)) for batch in batches]
        return PartBatches(there, order.to(device), before)

    def _own(self, part: int) -> range:
        return range(self._starts[part], self._starts[part + 1])

    def _before(self, part: int, count: int) -> list[int]:
        """Return the indices of the `count` tokens before a part, after padding where there are fewer."""
        found: list[int] = []
        parent = self.parents[part]
        while parent is not None and len(found) < count:
            own = self._own(parent)
            found = [*own[max(0, len(own) - count + len(found)) :], *found]
            parent = self.parents[parent]
        return [self.num_tokens] * (count - len(found)) + found


def convolve(
    core: Callable[..., Tensor], bound: inspect.BoundArguments, name: str, axis: int, kernel: int, tree: PrefixTree
) -> Tensor:
    """Call a causal convolution for the parts of a row.

    Args:
        bound: arguments of `core`, with the row as `name`; they are changed in place.
        axis: axis of the tokens.
        kernel: number of tokens that an output reads.
    """
    row = _followed_by_zeros(bound.arguments[name], axis)
    parts = tree.after_tokens(kernel - 1, row.device)
    outputs = []
    for batch in parts.batches:
        bound.arguments[name] = row[batch.tokens].movedim(1, axis)
        outputs.append(core(*bound.args, **bound.kwargs))
    return parts.row(outputs, axis)


def scan(
    core: Callable[..., Any],
    bound: inspect.BoundArguments,
    names: Sequence[str],
    axis: int,
    states: StateNames,
    tree: PrefixTree,
) -> Any:
    """Call a function that carries a state for the parts of a row, and return what it returns.

    Args:
        bound: arguments of `core`, with the row's inputs as `names`; they are changed in place.
        axis: axis of the tokens.
    """
    given = bound.arguments
    rows = {name: _followed_by_zeros(given[name], axis) for name in names if isinstance(given.get(name), Tensor)}
    parts = tree.by_depth(next(iter(rows.values())).device)
    inner, outputs = set(tree.parents), []
    ends: dict[int | None, Tensor] = {}
    for batch in parts.batches:
        given.update({name: row[batch.tokens].movedim(1, axis) for name, row in rows.items()})
        parents = [tree.parents[part] for part in batch.parts]
        given[states.initial] = None if parents[0] is None else torch.cat([ends[parent] for parent in parents])
        given[states.final] = asks = batch.parts[0] in inner
        output = core(*bound.args, **bound.kwargs)
        hidden, end = output if isinstance(output, tuple) else (output, None)
        if asks:
            ends.update(zip(batch.parts, end.split(1), strict=True))
        outputs.append(hidden)
    whole = parts.row(outputs, axis)
    return (whole, None) if states.is_pair else whole


def refuse_shared(name: str) -> NoReturn:
    """Refuse a function that cannot begin with a state.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(f"The recurrent function {name} takes no state to begin with, so that prompts cannot be shared.")


def _followed_by_zeros(row: Tensor, axis: int) -> Tensor:
    """Return a row `[1, ...]` as `[T + 1, ...]`, in which the last token, for padding, is zero."""
    flat = row.movedim(axis, 1)[0]
    return torch.cat([flat, flat.new_zeros((1, *flat.shape[1:]))])
