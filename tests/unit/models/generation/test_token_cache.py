"""Places of tokens in the cache of an engine: random rows that share, grow and leave, against a plain count."""

import random

import pytest
import torch

from nemo_rl.models.attention import Scoring
from nemo_rl.models.generation.decoding.continuous import NewTokens
from nemo_rl.models.generation.megatron.cache import TokenCache

CPU = torch.device("cpu")
NUM_PLACES = 60


def places(cache: TokenCache, row: str) -> list[int]:
    return cache._rows[row].tolist()


@pytest.mark.parametrize("seed", range(20))
def test_rows_never_share_more_than_they_asked_for(seed: int) -> None:
    draw = random.Random(seed)
    cache, shared_from = TokenCache(NUM_PLACES, CPU), {}
    lengths: dict[str, int] = {}
    for number in range(200):
        if lengths and draw.random() < 0.3:
            row = draw.choice(sorted(lengths))
            cache.forget([row])
            del lengths[row]
        elif cache.room >= 6 and draw.random() < 0.5:
            row, size = f"row {number}", draw.randint(1, 6)
            other = draw.choice(sorted(lengths)) if lengths and draw.random() < 0.5 else None
            num_shared = 0 if other is None else draw.randint(1, lengths[other])
            before = places(cache, other)[:num_shared] if other else []
            cache.add([NewTokens(row, [7] * size, other, num_shared)])
            assert places(cache, row)[:num_shared] == before
            lengths[row], shared_from[row] = num_shared + size, set(before)
        elif lengths and cache.room >= len(lengths):
            cache.add([NewTokens(row, [7]) for row in lengths])
            lengths = {row: length + 1 for row, length in lengths.items()}
        held = [set(places(cache, row)) - shared_from[row] for row in lengths]
        assert [len(places(cache, row)) for row in lengths] == list(lengths.values())
        assert sum(map(len, held)) == len(set().union(*held))
        assert cache.room == NUM_PLACES - len({place for row in lengths for place in places(cache, row)})


def test_a_pass_describes_new_and_earlier_tokens() -> None:
    cache = TokenCache(NUM_PLACES, CPU)
    cache.add([NewTokens("a", [1, 2, 3])])
    step = cache.add([NewTokens("a", [4]), NewTokens("b", [5, 6]), NewTokens("c", [9], "a", 2)])
    assert step.positions.tolist() == [3, 0, 1, 2]
    assert step.new.tolist() == [3, 4, 5, 6]
    assert step.seen.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 6]
    assert [tuple(piece) for piece in step.plan.pieces] == [(0, 1, 0, 4), (1, 3, 4, 6), (3, 4, 6, 9)]
    assert step.last.tolist() == [0, 2, 3]
    cache.forget(["a"])
    assert cache.room == NUM_PLACES - 5, "two of the tokens are those of c as well"


def test_attention_over_passes_is_that_of_the_whole_rows() -> None:
    """Rows of 5 and 3 tokens in passes of (3, 1), (1, 1) and (1, 1) tokens, in float64."""
    generator = torch.Generator().manual_seed(0)
    rows = {
        name: [torch.randn(length, heads, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)]
        for name, length in (("a", 5), ("b", 3))
    }
    cache, at = TokenCache(NUM_PLACES, CPU), {"a": 0, "b": 0}
    found: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    for counts in ({"a": 3, "b": 1}, {"b": 1, "a": 1}, {"a": 1, "b": 1}):
        step = cache.add([NewTokens(row, [0] * count) for row, count in counts.items()])
        parts = [
            torch.cat([rows[row][which][at[row] : at[row] + count] for row, count in counts.items()])[:, None]
            for which in range(3)
        ]
        out = step.attend(1, *parts, Scoring()).flatten(1)
        for row, part in zip(counts, out.split(list(counts.values())), strict=True):
            found[row].append(part)
            at[row] += len(part)
    for row, (query, key, value) in rows.items():
        scores = torch.einsum("tgqd,sgd->tgqs", query.unflatten(1, (2, 2)), key) / 8**0.5
        scores = scores.masked_fill(~torch.ones(len(query), len(query)).tril().bool()[:, None, None], -torch.inf)
        expected = torch.einsum("tgqs,sgd->tgqd", scores.softmax(-1), value).flatten(1)
        torch.testing.assert_close(torch.cat(found[row]), expected)
