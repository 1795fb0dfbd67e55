"""Packers and microbatch plans, on random lengths and by hand."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nemo_rl.data.common_prefixes import Prefixes
from nemo_rl.data.packing import (
    FixedSize,
    Packed,
    PackingAlgorithm,
    TokenBudget,
    get_packer,
    plan_microbatches,
    plan_prefixes,
)
from nemo_rl.data.packing.plan import divide_prefixes
from nemo_rl.utils.errors import DataError

pytestmark = pytest.mark.fast

CAPACITY = 64
lengths_of = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=60)
algorithms = st.sampled_from(list(PackingAlgorithm))


def fewest_bins(lengths, capacity):
    """Return the exact optimum by trying every partition into first-fit orders; for tiny inputs only."""
    return min(
        len(first_fit([lengths[i] for i in order], capacity)) for order in itertools.permutations(range(len(lengths)))
    )


def first_fit(lengths, capacity):
    bins = []
    for length in lengths:
        for bin_lengths in bins:
            if sum(bin_lengths) + length <= capacity:
                bin_lengths.append(length)
                break
        else:
            bins.append([length])
    return bins


@given(lengths_of, algorithms)
def test_each_sequence_is_in_one_bin_within_capacity(lengths, algorithm):
    bins = get_packer(algorithm, CAPACITY).pack(lengths)
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    assert all(rows and sum(lengths[i] for i in rows) <= CAPACITY for rows in bins)


@given(lengths_of, algorithms, st.integers(1, 6), st.integers(1, 6))
def test_packers_make_the_requested_number_of_bins(lengths, algorithm, least, multiple):
    packer = get_packer(algorithm, CAPACITY, min_bin_count=least, bin_count_multiple=multiple)
    free = len(get_packer(algorithm, CAPACITY).pack(lengths))
    wanted = -(-max(free, least) // multiple) * multiple
    if wanted > len(lengths):
        with pytest.raises(DataError, match="do not divide"):
            packer.pack(lengths)
        return
    bins = packer.pack(lengths)
    assert len(bins) == wanted
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    assert all(rows and sum(lengths[i] for i in rows) <= CAPACITY for rows in bins)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=6))
def test_decreasing_packers_keep_their_bounds(lengths):
    best = fewest_bins(lengths, CAPACITY)
    ffd = len(get_packer("first_fit_decreasing", CAPACITY).pack(lengths))
    mffd = len(get_packer("modified_first_fit_decreasing", CAPACITY).pack(lengths))
    assert best <= ffd <= 11 / 9 * best + 6 / 9
    assert best <= mffd <= 71 / 60 * best + 1


def test_first_fit_decreasing_equals_a_hand_computed_case():
    assert get_packer("FIRST_FIT_DECREASING", 10).pack([2, 5, 4, 7, 1, 3]) == [[3, 5], [1, 2, 4], [0]]


def test_concatenative_packing_keeps_the_order():
    assert get_packer("concatenative", 10).pack([6, 3, 4, 6, 1]) == [[0, 1], [2, 3], [4]]


def test_modified_first_fit_decreasing_equals_a_hand_computed_case():
    # Half is 30, a third 20, a sixth 10: the medium 27 completes the bin of 33, and the other bin
    # takes the shortest small one first, then the longest small one that still fits.
    lengths = [33, 31, 27, 17, 12]
    assert get_packer("modified_first_fit_decreasing", 60).pack(lengths) == [[0, 2], [1, 4, 3]]


def test_first_fit_shuffle_is_deterministic():
    lengths = [random.Random(1).randint(1, CAPACITY) for _ in range(50)]
    packer = get_packer("first_fit_shuffle", CAPACITY)
    assert packer.pack(lengths) == packer.pack(lengths)
    assert packer.pack(lengths) != get_packer("first_fit_decreasing", CAPACITY).pack(lengths)


def test_rows_that_are_too_long_are_named_with_their_lengths():
    with pytest.raises(DataError, match=r"row 1 has 70, row 3 has 80"):
        get_packer("first_fit_decreasing", CAPACITY).pack([1, 70, 64, 80])
    with pytest.raises(DataError, match=r"row 1 has 63.*train_mb_tokens"):
        plan_microbatches([1, 63], 1, Packed(64, round_to=10))


def test_an_unknown_algorithm_is_refused_with_the_known_ones():
    with pytest.raises(DataError, match="best_fit.*modified_first_fit_decreasing"):
        get_packer("best_fit", 8)


def test_packing_metrics_equal_hand_computed_values():
    packer = get_packer("concatenative", 10, collect_metrics=True)
    bins = packer.pack([6, 3, 4])
    stats = packer.compute_metrics([6, 3, 4], bins)
    assert stats["average_utilization"] == pytest.approx(13 / 20)
    assert stats["waste_ratio"] == pytest.approx(7 / 20)
    assert stats["bin_balance"] == pytest.approx(4 / 9)
    assert stats["packing_efficiency"] == 1.0
    assert (stats["min_bin_tokens"], stats["max_bin_tokens"]) == (4, 9)
    nothing = packer.compute_metrics([], [])
    assert nothing["waste_ratio"] == 1.0 and not any(nothing[key] for key in nothing.keys() - {"waste_ratio"})
    packer.pack([10])
    assert packer.get_aggregated_metrics()["average_utilization"] == pytest.approx(23 / 30)
    packer.reset_metrics()
    assert packer.get_aggregated_metrics() == {}


strategies = st.one_of(
    st.builds(TokenBudget, st.just(CAPACITY * 2), st.sampled_from([1, 8])),
    st.builds(Packed, st.just(CAPACITY), algorithms, st.sampled_from([1, 8])),
)


@settings(deadline=None)
@given(lengths_of, st.integers(1, 5), strategies)
def test_a_plan_holds_every_row_once_within_its_limits(lengths, num_shards, strategy):
    lengths = (lengths * num_shards)[: len(lengths) // num_shards * num_shards or num_shards]
    plan = plan_microbatches(lengths, num_shards, strategy)
    assert len(plan.shards) == num_shards
    assert {len(shard) for shard in plan.shards} == {plan.num_microbatches}
    assert sorted(plan.row_order) == list(range(len(lengths)))
    assert [plan.row_order[i] for i in plan.restore_order] == list(range(len(lengths)))
    rounded = [-(-n // strategy.round_to) * strategy.round_to for n in lengths]
    for rows in itertools.chain(*plan.shards):
        assert rows
        if isinstance(strategy, Packed):
            assert sum(rounded[i] for i in rows) <= strategy.capacity
        else:
            assert max(rounded[i] for i in rows) * len(rows) <= strategy.max_tokens
    if isinstance(strategy, Packed):  # `microbatch_order: largest_first` is always true
        costs = [[sum(rounded[i] for i in rows) for rows in shard] for shard in plan.shards]
        assert costs == [sorted(shard, reverse=True) for shard in costs]
    assert plan == plan_microbatches(lengths, num_shards, strategy)


def test_fixed_size_groups_similar_lengths_and_deals_them_evenly():
    plan = plan_microbatches([9, 2, 8, 3, 1, 6, 7, 1], 2, FixedSize(2))
    assert plan.shards == [[[0, 2], [4, 7]], [[6, 5], [3, 1]]]
    pairs = plan_microbatches([1, 2, 9, 1, 2, 2, 1, 8], 1, FixedSize(4), group_size=2)
    assert pairs.shards == [[[2, 3, 6, 7], [0, 1, 4, 5]]]


def test_fixed_size_errors_name_the_nearest_sizes():
    with pytest.raises(DataError, match=r"50 / \(4 x 4\)\. Nearest: 48, 64"):
        plan_microbatches([1] * 50, 4, FixedSize(4))


def test_token_budget_groups_similar_lengths():
    plan = plan_microbatches([2, 30, 3, 31], 1, TokenBudget(62))
    assert [sorted(rows) for rows in plan.shards[0]] == [[1, 3], [0, 2]]


def test_fewer_rows_than_shards_are_refused():
    with pytest.raises(DataError, match="2 rows do not divide among 3"):
        plan_microbatches([1, 1], 3, Packed(8))
    with pytest.raises(DataError, match="do not divide"):
        plan_microbatches([8, 8, 8], 2, Packed(8))


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=3, max_size=30),
    st.integers(1, 3),
    st.sampled_from([Packed(CAPACITY), Packed(CAPACITY, round_to=4), TokenBudget(CAPACITY), FixedSize(2)]),
)
@settings(deadline=None)
def test_pairs_stay_together(pairs, num_shards, strategy):
    pairs = pairs[: len(pairs) // num_shards * num_shards]
    lengths = [length for pair in pairs for length in pair]
    plan = plan_microbatches(lengths, num_shards, strategy, group_size=2)
    assert sorted(plan.row_order) == list(range(len(lengths)))
    assert len({len(shard) for shard in plan.shards}) == 1
    for rows in itertools.chain(*plan.shards):
        assert all(b == a + 1 and a % 2 == 0 for a, b in zip(rows[::2], rows[1::2], strict=True))
        if isinstance(strategy, Packed):
            cost = sum(-(-lengths[row] // strategy.round_to) * strategy.round_to for row in rows)
            assert cost <= CAPACITY
        if isinstance(strategy, TokenBudget):
            assert max(lengths[row] for row in rows) * len(rows) <= CAPACITY


def test_pairs_that_cannot_stay_together_are_refused():
    with pytest.raises(DataError, match="5 rows do not divide into groups of 2"):
        plan_microbatches([1] * 5, 1, FixedSize(2), group_size=2)
    with pytest.raises(DataError, match="microbatch of 3 rows would split groups of 2"):
        plan_microbatches([1] * 6, 1, FixedSize(3), group_size=2)
    with pytest.raises(DataError, match="longer than the 64 tokens"):
        plan_microbatches([40, 30], 1, Packed(CAPACITY), group_size=2)


GROUPS = Prefixes(list(range(9)), [0, 10, 10, 10, 0, 20, 20, 20, 0])
GROUP_LENGTHS = [15, 15, 16, 12, 25, 30, 22, 24, 33]


def shared_tokens(rows: list[int]) -> int:
    """Return the tokens of a microbatch that holds each prompt once."""
    return GROUPS.within(rows).tokens(GROUP_LENGTHS)


@pytest.mark.parametrize("capacity", [33, 40, 64, 200])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 9])
def test_trees_fill_microbatches_that_hold_each_prompt_once(capacity, num_shards) -> None:
    plan = plan_prefixes(GROUPS, GROUP_LENGTHS, num_shards, Packed(capacity))
    assert sorted(plan.row_order) == list(range(9))
    assert len({len(shard) for shard in plan.shards}) == 1
    assert all(rows and shared_tokens(rows) <= capacity for shard in plan.shards for rows in shard)


def test_trees_stay_whole_where_they_fit_and_shards_come_out_equal() -> None:
    (shard,) = plan_prefixes(GROUPS, GROUP_LENGTHS, 1, Packed(200)).shards
    assert shard == [[4, 5, 6, 7, 8, 0, 1, 2, 3]]
    # 28, 41 and 33 tokens: parts of half the size would leave the busier shard with more.
    loads = [shared_tokens(rows) for (rows,) in plan_prefixes(GROUPS, GROUP_LENGTHS, 2, Packed(200)).shards]
    assert sorted(loads) == [41, 61]
    # Four shards, three trees: some trees are divided.
    assert all(plan_prefixes(GROUPS, GROUP_LENGTHS, 4, Packed(200)).shards)


def test_trees_are_planned_as_rows_where_nothing_is_shared() -> None:
    alone = Prefixes.alone(9)
    assert plan_prefixes(alone, GROUP_LENGTHS, 2, Packed(64)) == plan_microbatches(GROUP_LENGTHS, 2, Packed(64))


def test_a_row_of_a_tree_that_is_too_long_is_named() -> None:
    with pytest.raises(DataError, match="row 8 has 33"):
        plan_prefixes(GROUPS, GROUP_LENGTHS, 1, Packed(32))


LONG_PROMPTS = {
    "16 answers of 100": (4000, 16, 100, 8192),
    "32 answers of 64": (6000, 32, 64, 8192),
    "8 answers of 512": (1024, 8, 512, 8192),
    "one answer fits": (8000, 4, 150, 8192),
}
"""Tokens of a prompt, answers, tokens of each, and of a microbatch."""


@pytest.mark.parametrize("factor", [2, 4])
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("case", LONG_PROMPTS)
def test_keys_of_shared_prompts_are_bounded(case, num_shards, factor) -> None:
    prompt, answers, each, capacity = LONG_PROMPTS[case]
    families = Prefixes(list(range(3 * answers)), [prompt - 1 if row % answers else 0 for row in range(3 * answers)])
    lengths = [prompt + each + row % 3 for row in range(3 * answers)]
    bounded = plan_prefixes(families, lengths, num_shards, Packed(capacity, keys_per_token=factor))
    assert bounded == plan_prefixes(families, lengths, num_shards, Packed(capacity, keys_per_token=factor))
    assert sorted(bounded.row_order) == list(range(3 * answers))
    free = plan_prefixes(families, lengths, num_shards, Packed(capacity))
    most = [
        max(families.within(rows).keys(lengths) for shard in plan.shards for rows in shard) for plan in (bounded, free)
    ]
    assert most[0] <= factor * capacity
    assert (most[1] <= factor * capacity) is (bounded == free), "the bound changes nothing where it does not bind"
    if case in ("16 answers of 100", "32 answers of 64") and num_shards == 1:
        assert most[1] > 4 * capacity


def test_keys_are_counted_as_they_are_laid_out() -> None:
    assert Prefixes([0, 1], [0, 10]).keys([15, 12]) == 10 + 15 + 12
    assert Prefixes([0], [0]).keys([15]) == 15, "a row by itself shares nothing"
    few_keys = divide_prefixes(Prefixes([0, 1, 2], [0, 10, 10]), [15] * 3, 100, lambda part: part.keys([15] * 3) <= 40)
    assert [unit.rows for unit in few_keys] == [[0, 1], [2]]
    nested = Prefixes([0, 1, 2, 3], [0, 30, 10, 30])
    assert nested.keys([40] * 4) == 10 + 2 * 30 + 4 * 40
    assert [unit.rows for unit in divide_prefixes(nested, [40] * 4, 60)] == [[0, 1], [2, 3]]
    assert [unit.rows for unit in divide_prefixes(nested, [40] * 4, 89)] == [[0, 1], [2, 3]], "not [0, 1, 2]"


trees = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=24)


@given(trees, st.integers(1, 3), st.sampled_from([None, 2, 4]))
def test_trees_keep_within_tokens_and_keys(branches, num_shards, factor) -> None:
    """Each letter of a branch stands for ten tokens."""
    tokens = [np.repeat(np.array(branch) * 10, 10) + np.tile(np.arange(10), len(branch)) for branch in branches]
    lengths, prefixes = [len(row) for row in tokens], Prefixes.of(tokens)
    assume(len(tokens) % num_shards == 0)  # filler rows see to it
    strategy = Packed(CAPACITY, keys_per_token=factor)
    plan = plan_prefixes(prefixes, lengths, num_shards, strategy)
    assert sorted(plan.row_order) == list(range(len(tokens)))
    assert len({len(shard) for shard in plan.shards}) == 1
    for rows in (rows for shard in plan.shards for rows in shard):
        part = prefixes.within(rows)
        assert part.tokens(lengths) <= CAPACITY
        assert strategy.most_keys is None or part.keys(lengths) <= max(strategy.most_keys, *(lengths[r] for r in rows))


def test_microbatches_come_largest_first_or_as_they_were_packed() -> None:
    lengths = [3, 8, 2, 7, 6]
    in_order = {"algorithm": "concatenative", "capacity": 8}
    assert plan_microbatches(lengths, 1, Packed(**in_order)).shards == [[[1], [3], [4], [0], [2]]]
    assert plan_microbatches(lengths, 1, Packed(**in_order, largest_first=False)).shards == [[[0], [1], [2], [3], [4]]]
    two_ranks = plan_microbatches([3, 8, 2, 7], 2, Packed(**in_order, largest_first=False))
    assert two_ranks.shards == [[[0], [3]], [[1], [2]]]
