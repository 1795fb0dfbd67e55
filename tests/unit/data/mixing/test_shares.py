"""The division of batches by shares: every batch is as close as integers allow, and all batches together too."""

import math
import random
from collections import Counter

import pytest

from nemo_rl.data.streams.mixed_stream import Division, evenly_spread

pytestmark = pytest.mark.fast


def random_shares(chance: random.Random) -> dict[str, float]:
    weights = [chance.random() ** chance.choice([1, 3]) + 1e-3 for _ in range(chance.randint(2, 12))]
    if chance.random() < 0.5:
        weights = [round(weight, 1) + 0.1 for weight in weights]
    return {f"set{index}": weight / sum(weights) for index, weight in enumerate(weights)}


@pytest.mark.parametrize("seed", range(40))
def test_a_batch_is_rounded_and_1000_batches_are_within_one_prompt(seed: int) -> None:
    chance = random.Random(seed)
    shares, size = random_shares(chance), chance.choice([1, 2, 3, 5, 8, 32, 100])
    division, given = Division(list(shares)), Counter[str]()
    for step in range(1, 1001):
        counts = division.next_counts(size, shares)
        assert sum(counts.values()) == size
        for name, share in shares.items():
            assert math.floor(size * share + 1e-9) <= counts[name] <= math.ceil(size * share - 1e-9)
        given.update(counts)
        assert all(abs(given[name] - step * size * share) < 1 for name, share in shares.items())


def test_weights_of_three_and_one_by_hand() -> None:
    division, shares = Division(["easy", "hard"]), {"easy": 0.75, "hard": 0.25}
    counts = [division.next_counts(2, shares) for _ in range(4)]
    # 1.5 and 0.5 prompts of each batch: the tie of the first one goes to the set that is named first.
    assert [(each["easy"], each["hard"]) for each in counts] == [(2, 0), (1, 1), (2, 0), (1, 1)]


def test_shares_that_change_are_met_on_the_whole_and_no_share_gives_no_prompt() -> None:
    chance = random.Random(3)
    names = ["a", "b", "c", "d"]
    division, wanted, given = Division(names), Counter[str](), Counter[str]()
    for step in range(2000):
        weights = {name: chance.random() for name in names} | ({"d": 0.0} if step < 1000 else {})
        shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
        counts = division.next_counts(7, shares)
        assert step >= 1000 or counts["d"] == 0
        for name in names:
            wanted[name] += 7 * shares[name]  # type: ignore[assignment]
        given.update(counts)
    assert all(abs(given[name] - wanted[name]) < 2 for name in names)


def test_a_restored_division_continues() -> None:
    shares = {"a": 0.37, "b": 0.41, "c": 0.22}
    whole, first, second = (Division(list(shares)) for _ in range(3))
    expected = [whole.next_counts(5, shares) for _ in range(50)]
    found = [first.next_counts(5, shares) for _ in range(17)]
    second.load_state_dict(first.state_dict())
    found += [second.next_counts(5, shares) for _ in range(33)]
    assert found == expected


def test_data_sets_alternate_within_a_batch() -> None:
    assert evenly_spread({"a": 3, "b": 1, "c": 0}) == ["a", "a", "b", "a"]
    assert evenly_spread({"a": 2, "b": 2}) == ["a", "b", "a", "b"]
