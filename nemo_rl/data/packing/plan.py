"""Assign each row of a batch to a data-parallel shard and a microbatch.

The policy follows the plan without decisions of its own. Invariant: every row appears exactly once, every shard has the
same number of non-empty microbatches (so that collectives match), and equal lengths lead to equal plans.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import batched

import torch
from torch import Tensor

from nemo_rl.data.common_prefixes import Prefixes
from nemo_rl.data.packing.algorithms import PackingAlgorithm, get_packer, spread_bins
from nemo_rl.utils.errors import DataError

SHARED_PREFIXES = "shared_prefixes"
"""Key of a microbatch for `[b, 2]` int64: the place of each row in the order of `Prefixes`, and the number of tokens
that it shares with the row before it in that order. Without the key, or if all are 0, rows share nothing."""

PROMPT_GROUPS = "prompt_groups"
"""Key of a batch for `[B]` int64: equal numbers for the rows of one prompt, and -1 for filler rows. If it is present,
only rows of one prompt share tokens, so that the layout of a batch does not depend on where its tokens are stored."""


def column_of(prefixes: Prefixes, rows: Sequence[int]) -> Tensor:
    """Return the values for `SHARED_PREFIXES` `[b, 2]` of a microbatch with the given rows."""
    part = prefixes.within(rows)
    entries = {row: (place, shared) for place, (row, shared) in enumerate(zip(part.rows, part.shared, strict=True))}
    return torch.tensor([entries[row] for row in rows], dtype=torch.int64)


def prefixes_of(column: Tensor) -> Prefixes:
    """Return the tree that the values of `SHARED_PREFIXES` `[b, 2]` of a microbatch describe."""
    order = column[:, 0].argsort()
    return Prefixes(order.tolist(), column[order, 1].tolist())


def divide_prefixes(
    prefixes: Prefixes,
    lengths: Sequence[int],
    most_tokens: int,
    is_within: Callable[[Prefixes], bool] = lambda part: True,
) -> Iterator[Prefixes]:
    """Divide rows into units that share few tokens, have a limited number of tokens, and are within other limits.

    Rows that share many tokens stay together: if a unit becomes too large, it ends before the row that shares the
    fewest tokens with the row before it. A single row may exceed the limits.
    """
    start = 0
    for place in range(1, len(prefixes.rows)):
        if prefixes.shared[place] == 0:
            yield prefixes.part(start, place)
            start = place
        while start < place:
            part = prefixes.part(start, place + 1)
            if part.tokens(lengths) <= most_tokens and is_within(part):
                break
            cut = min(range(place, start, -1), key=prefixes.shared.__getitem__)
            yield prefixes.part(start, cut)
            start = cut
    yield prefixes.part(start, len(prefixes.rows))


@dataclass(frozen=True)
class Patches:
    """The patches of the images of each row of a batch, which are a cost of a microbatch besides its tokens.

    A vision tower keeps the activations of each patch for the backward pass. A token of an image has several patches,
    and a token of text has none.
    """

    of_rows: Sequence[Sequence[tuple[int, int]]]
    """Index of the first token of each image of each row, and its number of patches."""

    @property
    def totals(self) -> list[int]:
        """Return the number of patches of each row by itself."""
        return [sum(count for _, count in images) for images in self.of_rows]

    def of(self, prefixes: Prefixes) -> int:
        """Return the number of patches of a layout in which rows share tokens. Shared images are counted once."""
        rows = zip(prefixes.rows, prefixes.shared, strict=True)
        return sum(count for row, shared in rows for first, count in self.of_rows[row] if first >= shared)


@dataclass(frozen=True)
class FixedSize:
    """Microbatches of `size` rows of similar length, which reduces padding."""

    size: int


@dataclass(frozen=True)
class TokenBudget:
    """Dynamic batching: rows of similar length share a padded microbatch.

    A microbatch of n rows costs n times the length of its longest row, rounded up to `round_to`. This cost is at most
    `max_tokens`. Its rows have at most `max_patches` patches of images; None for no limit.
    """

    max_tokens: int
    round_to: int = 1
    max_patches: int | None = None

    @property
    def capacity(self) -> int:
        """Return the largest cost of a microbatch."""
        return self.max_tokens


@dataclass(frozen=True)
class Packed:
    """Sequence packing: the rows of a microbatch are concatenated.

    Row lengths are rounded up to `round_to`, and the sum of a microbatch is at most `capacity`. If rows share tokens
    (`plan_prefixes`), it has at most `keys_per_token` x `capacity` attention keys. `keys_per_token` is at least 2, or
    None for no limit. Its rows have at most `max_patches` patches of images; None for no limit. Microbatches are in the
    packer's order or, with `largest_first`, by decreasing length.
    """

    capacity: int
    algorithm: PackingAlgorithm | str = PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING
    round_to: int = 1
    keys_per_token: int | None = None
    largest_first: bool = True
    max_patches: int | None = None

    @property
    def most_keys(self) -> int | None:
        """Largest number of keys in a microbatch, or None for no limit."""
        return None if self.keys_per_token is None else self.capacity * self.keys_per_token


@dataclass(frozen=True)
class OneByOne:
    """Each row, or each group of rows that stay together, is a microbatch. Shards take turns in the order of rows."""


MicrobatchStrategy = FixedSize | TokenBudget | Packed | OneByOne


@dataclass(frozen=True)
class MicrobatchPlan:
    """Rows of every microbatch of every shard."""

    shards: list[list[list[int]]]
    """Indices of rows of the planned batch, as [shard][microbatch][row]."""

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of each shard."""
        return len(self.shards[0])

    def shard_rows(self, shard: int) -> list[int]:
        """Return the indices of the rows of one shard, in the order of its microbatches."""
        return [row for rows in self.shards[shard] for row in rows]

    @cached_property
    def row_order(self) -> list[int]:
        """Return the indices of the rows in the order of the shards' concatenated results."""
        return [row for shard in range(len(self.shards)) for row in self.shard_rows(shard)]

    @cached_property
    def restore_order(self) -> list[int]:
        """Return the indices that restore the order of the batch: `results[restore_order]`."""
        positions = [0] * len(self.row_order)
        for position, row in enumerate(self.row_order):
            positions[row] = position
        return positions


def plan_microbatches(
    lengths: Sequence[int],
    num_shards: int,
    strategy: MicrobatchStrategy,
    group_size: int = 1,
    patches: Sequence[int] | None = None,
) -> MicrobatchPlan:
    """Plan one global batch.

    If the plan by tokens has a microbatch with too many patches of images, the batch is planned again by the larger
    cost of each row's tokens and patches.

    Args:
        lengths: Number of tokens of each of the B rows.
        num_shards: Number of data-parallel ranks.
        strategy: How rows are grouped into microbatches.
        group_size: Number of consecutive rows that must be in the same microbatch, 2 for pairs of answers.
        patches: Number of patches of images of each row. None if no row has images.

    Raises:
        DataError: The rows cannot be divided among shards and microbatches, or a row is longer than a microbatch may be
            or has more patches (the message names rows and numbers).

    Example:
        >>> plan_microbatches([5, 3, 2, 6], 2, Packed(capacity=8)).shards
        [[[3, 2]], [[0, 1]]]
    """
    if isinstance(strategy, OneByOne):
        return _plan_one_by_one(len(lengths), num_shards, group_size)
    plan = _plan_tokens(lengths, num_shards, strategy, group_size)
    if patches is None or isinstance(strategy, FixedSize) or strategy.max_patches is None:
        return plan
    costs = _Costs(patches, strategy.max_patches)
    if costs.hold(plan):
        return plan
    _check_patches([sum(group) for group in batched(patches, group_size)], strategy.max_patches)
    return _plan_tokens(costs.added_to(lengths, strategy), num_shards, strategy, group_size)


@dataclass(frozen=True)
class _Costs:
    """A cost of each of some units besides tokens, whose sum in a microbatch is limited."""

    of_units: Sequence[int]
    most: int

    def hold(self, plan: MicrobatchPlan) -> bool:
        """Return whether all microbatches of a plan are within the limit."""
        return all(sum(self.of_units[unit] for unit in rows) <= self.most for shard in plan.shards for rows in shard)

    def added_to(self, tokens: Sequence[int], strategy: "TokenBudget | Packed") -> list[int]:
        """Return the larger cost of tokens and of this cost for each unit, in tokens.

        A plan by this cost is within both limits.
        """
        capacity, most_tokens = strategy.capacity, strategy.capacity // strategy.round_to * strategy.round_to
        scaled = [min(-(-cost * capacity // self.most), most_tokens) for cost in self.of_units]
        return [max(pair) for pair in zip(tokens, scaled, strict=True)]


def _plan_one_by_one(num_rows: int, num_shards: int, group_size: int) -> MicrobatchPlan:
    if num_rows < 1 or num_rows % (num_shards * group_size):
        raise DataError(f"{num_rows} rows do not divide among {num_shards} data-parallel ranks x {group_size} rows.")
    starts = range(0, num_rows, group_size)
    return MicrobatchPlan(
        [[list(range(start, start + group_size)) for start in starts[shard::num_shards]] for shard in range(num_shards)]
    )


def _plan_tokens(
    lengths: Sequence[int], num_shards: int, strategy: FixedSize | TokenBudget | Packed, group_size: int = 1
) -> MicrobatchPlan:
    """Plan one global batch by the numbers of tokens of its rows (`plan_microbatches`)."""
    if group_size > 1:
        return _plan_groups([int(length) for length in lengths], num_shards, strategy, group_size)
    if num_shards < 1:
        raise DataError(f"num_shards={num_shards}: a plan needs at least one data-parallel rank.")
    if len(lengths) < num_shards:
        raise DataError(
            f"{len(lengths)} rows do not divide among {num_shards} data-parallel ranks: "
            f"each rank needs at least one. Use at least {num_shards} rows."
        )
    lengths = [int(length) for length in lengths]
    if isinstance(strategy, FixedSize):
        return _plan_fixed(lengths, num_shards, strategy.size)
    if strategy.round_to < 1:
        raise DataError(f"round_to={strategy.round_to}: lengths round up to a multiple of >= 1.")
    costs = [-(-length // strategy.round_to) * strategy.round_to for length in lengths]
    if isinstance(strategy, Packed):
        _check_fit(lengths, costs, strategy.capacity)
        packer = get_packer(
            strategy.algorithm,
            strategy.capacity,
            min_bin_count=num_shards,
            bin_count_multiple=num_shards,
        )
        bins = packer.pack(costs)
        tokens = [sum(costs[row] for row in rows) if strategy.largest_first else 0 for rows in bins]
        return _deal(bins, tokens, num_shards)
    _check_fit(lengths, costs, strategy.max_tokens)
    bins = _group_by_length(costs, strategy.max_tokens)
    spread_bins(bins, costs, -(-len(bins) // num_shards) * num_shards)
    return _deal(bins, [_padded_tokens(costs, rows) for rows in bins], num_shards)


@dataclass(frozen=True)
class _Limit:
    """A limited cost of prefix trees besides tokens."""

    most: int
    """Largest cost of a microbatch."""
    cost: Callable[[Prefixes], int]
    """Cost of a microbatch with the rows of a tree."""
    most_added: Callable[[Prefixes], int]
    """Largest cost that the rows of a tree can add to a microbatch with other rows."""

    def holds(self, part: Prefixes) -> bool:
        """Return whether the rows of a tree fit into a microbatch."""
        return self.cost(part) <= self.most


def _all_hold(limits: Sequence[_Limit], part: Prefixes) -> bool:
    return all(limit.holds(part) for limit in limits)


def plan_prefixes(
    prefixes: Prefixes, lengths: Sequence[int], num_shards: int, strategy: Packed, patches: Patches | None = None
) -> MicrobatchPlan:
    """Plan rows that share tokens. A microbatch contains shared tokens only once.

    Whole trees need fewer tokens, but divided trees balance the shards better. Several divisions are tried. The plan
    whose busiest shard has the least work is used. Attention repeats the keys of shared tokens for each of their rows,
    and the backward pass keeps these keys in memory. If a microbatch has too many keys, or too many patches of images,
    the batch is planned again with keys and patches as costs.

    Args:
        prefixes: tree of the tokens that the rows share.
        lengths: number of tokens of each row.
        num_shards: number of data-parallel ranks.
        strategy: how microbatches are packed.
        patches: patches of the rows' images. None if no row has images.

    Raises:
        DataError: raised by `plan_microbatches`.
    """
    plan = _plan_parts(prefixes, lengths, num_shards, strategy)
    limits = _limits(prefixes, lengths, strategy, patches)
    batches = [prefixes.within(rows) for shard in plan.shards for rows in shard]
    if all(_all_hold(limits, rows) for rows in batches):
        return plan
    if patches is not None and strategy.max_patches is not None:
        _check_patches(patches.totals, strategy.max_patches)
    return _plan_parts(prefixes, lengths, num_shards, strategy, limits, patches)


def _limits(prefixes: Prefixes, lengths: Sequence[int], strategy: Packed, patches: Patches | None) -> Sequence[_Limit]:
    """Return the limits of a strategy besides tokens."""
    limits = []
    if (most := strategy.most_keys) is not None:
        limits.append(_Limit(most, lambda part: part.keys(lengths), _KeysAdded(prefixes, lengths)))
    if patches is not None and strategy.max_patches is not None:
        limits.append(_Limit(strategy.max_patches, patches.of, patches.of))
    return limits


def _plan_parts(
    prefixes: Prefixes,
    lengths: Sequence[int],
    num_shards: int,
    strategy: Packed,
    limits: Sequence[_Limit] = (),
    patches: Patches | None = None,
) -> MicrobatchPlan:
    """Return the best plan among several divisions of the trees. If there is none, plan rows without sharing."""
    busiest: dict[int, MicrobatchPlan] = {}
    if not prefixes.is_flat and max(lengths) <= strategy.capacity:
        total = prefixes.tokens(lengths)
        for parts in (1, 2, 4):
            most_tokens = min(strategy.capacity, -(-total // (parts * num_shards)))
            within = partial(_all_hold, limits)
            units = list(divide_prefixes(prefixes, lengths, most_tokens, within))
            tokens = [unit.tokens(lengths) for unit in units]
            costs = [_Costs([limit.most_added(unit) for unit in units], limit.most) for limit in limits]
            try:
                plan = _plan_within(tokens, costs, num_shards, strategy)
            except DataError:
                continue  # too few parts to give each shard the same number of microbatches
            most = max(sum(tokens[unit] for unit in plan.shard_rows(shard)) for shard in range(num_shards))
            busiest.setdefault(most, _with_rows(plan, [unit.rows for unit in units]))
    totals = patches.totals if patches is not None else None
    return busiest[min(busiest)] if busiest else plan_microbatches(lengths, num_shards, strategy, patches=totals)


class _KeysAdded:
    """The largest number of keys that the rows of a unit can add to a microbatch.

    With other units of its tree, a unit may need nodes that it does not need alone. They are on the path of its first
    row, so all nodes of this path are counted.
    """

    def __init__(self, prefixes: Prefixes, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._paths = dict(zip(sorted(prefixes.rows), prefixes.paths(), strict=True))

    def __call__(self, unit: Prefixes) -> int:
        return (
            unit.keys(self._lengths)
            - sum(node.depth for node in unit.nodes if node.first == 0)
            + sum(depth for depth, _ in self._paths[unit.rows[0]].nodes)
        )


def _plan_within(tokens: Sequence[int], costs: Sequence[_Costs], num_shards: int, strategy: Packed) -> MicrobatchPlan:
    """Plan units by tokens. If a microbatch exceeds another limit, use the largest of all costs of each unit."""
    plan = plan_microbatches(tokens, num_shards, strategy)
    if all(each.hold(plan) for each in costs):
        return plan
    for each in costs:
        tokens = each.added_to(tokens, strategy)
    return plan_microbatches(tokens, num_shards, strategy)


def _with_rows(plan: MicrobatchPlan, units: Sequence[Sequence[int]]) -> MicrobatchPlan:
    """Convert a plan of units to a plan of their rows."""
    return MicrobatchPlan(
        [[[row for unit in batch for row in units[unit]] for batch in shard] for shard in plan.shards]
    )


def _plan_groups(
    lengths: Sequence[int], num_shards: int, strategy: FixedSize | TokenBudget | Packed, group_size: int
) -> MicrobatchPlan:
    """Plan groups of rows as if each group were one row. Replace each group in the plan with its rows."""
    if len(lengths) % group_size:
        raise DataError(f"{len(lengths)} rows do not divide into groups of {group_size}.")
    groups = [lengths[start : start + group_size] for start in range(0, len(lengths), group_size)]
    if isinstance(strategy, FixedSize):
        if strategy.size % group_size:
            raise DataError(f"a microbatch of {strategy.size} rows would split groups of {group_size}.")
        costs = [max(group) for group in groups]
        strategy = FixedSize(strategy.size // group_size)
    else:
        rounded = [[-(-length // strategy.round_to) * strategy.round_to for length in group] for group in groups]
        packed = isinstance(strategy, Packed)
        costs = [sum(group) if packed else group_size * max(group) for group in rounded]
    units = [range(start, start + group_size) for start in range(0, len(lengths), group_size)]
    return _with_rows(plan_microbatches(costs, num_shards, strategy), units)


def _plan_fixed(lengths: Sequence[int], num_shards: int, size: int) -> MicrobatchPlan:
    num_rows, step = len(lengths), num_shards * size
    if size < 1 or num_rows % step:
        below = num_rows // step * step if size > 0 else 0
        nearest = ", ".join(str(n) for n in (below, below + step) if n > 0)
        raise DataError(
            f"{num_rows} rows do not divide into {num_shards} data-parallel ranks x {size} rows "
            f"a microbatch: {num_rows} / ({num_shards} x {size}). Nearest: {nearest or 'none'}."
        )
    order = _longest_first(lengths)
    bins = [order[start : start + size] for start in range(0, num_rows, size)]
    return _deal(bins, [_padded_tokens(lengths, rows) for rows in bins], num_shards)


def _check_fit(lengths: Sequence[int], costs: Sequence[int], capacity: int) -> None:
    too_long = [i for i, cost in enumerate(costs) if cost > capacity]
    if not too_long:
        return
    rows = ", ".join(f"row {i} has {lengths[i]}" for i in too_long[:5])
    more = f" and {len(too_long) - 5} more" if len(too_long) > 5 else ""
    raise DataError(
        f"{len(too_long)} of {len(lengths)} rows are longer than the {capacity} tokens of a "
        f"microbatch (lengths rounded up): {rows}{more}. "
        "Raise train_mb_tokens / logprob_mb_tokens or lower max_total_sequence_length."
    )


def _check_patches(totals: Sequence[int], most: int) -> None:
    """Check that each row, or each group of rows, fits into a microbatch.

    Args:
        totals: number of patches of each row or group.
        most: largest number of patches of a microbatch.

    Raises:
        DataError: one has too many patches.
    """
    large = [(index, total) for index, total in enumerate(totals) if total > most]
    if large:
        index, total = max(large, key=lambda pair: pair[1])
        raise DataError(
            f"{len(large)} of {len(totals)} rows have more patches of images than max_patches={most}: row {index} has "
            f"{total}. Raise max_patches, or make images smaller with policy.tokenizer.processor_kwargs."
        )


def _padded_tokens(costs: Sequence[int], rows: Sequence[int]) -> int:
    return max(costs[row] for row in rows) * len(rows)


def _longest_first(costs: Sequence[int]) -> list[int]:
    return sorted(range(len(costs)), key=lambda row: (-costs[row], row))


def _group_by_length(costs: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Divide the rows, longest first, into groups whose padded size is within the budget."""
    groups: list[list[int]] = []
    for row in _longest_first(costs):
        if groups and costs[groups[-1][0]] * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _deal(bins: list[list[int]], costs: Sequence[int], num_shards: int) -> MicrobatchPlan:
    """Distribute bins among shards, most expensive first, in rounds of alternating direction.

    Bins that run at the same time on different shards then have similar costs, and the first microbatch needs the most
    memory.
    """
    shards: list[list[list[int]]] = [[] for _ in range(num_shards)]
    order = sorted(range(len(bins)), key=lambda i: (-costs[i], i))
    for turn, start in enumerate(range(0, len(order), num_shards)):
        dealt = order[start : start + num_shards]
        for shard, index in zip(shards, dealt if turn % 2 == 0 else reversed(dealt), strict=True):
            shard.append(bins[index])
    return MicrobatchPlan(shards)
