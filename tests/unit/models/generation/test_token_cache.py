"""Places of tokens in the cache of an engine: random rows that share, grow and end, against a plain count."""

import random

import pytest
import torch

from nemo_rl.models.attention import Scoring
from nemo_rl.models.generation.continuous import Cost, TokenCache

CPU = torch.device("cpu")
NUM_PLACES = 60


class Model:
    """A stand-in for a layer: at each place it keeps the token that was read there, and all tokens before it."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[int, ...]] = {}

    def read(self, cache: TokenCache, rows: dict[str, list[int]]) -> list[tuple[int, ...]]:
        """Return for each row all tokens that its last token sees, as read at their places."""
        step = cache.read(rows)
        seen = step.seen.tolist()
        for piece in step.plan.pieces:
            row = seen[piece.key_start : piece.key_stop]
            for query in range(piece.query_start, piece.query_stop):
                position = int(step.positions[query])
                assert row[position] == int(step.new[query])
                before = self.kept[row[position - 1]] if position else ()
                self.kept[row[position]] = (*before, int(step.token_ids[query]))
        return [self.kept[seen[piece.key_stop - 1]] for piece in step.plan.pieces]


@pytest.mark.parametrize("seed", range(20))
def test_rows_always_see_their_own_tokens(seed: int) -> None:
    """Rows over two letters often begin alike; the places of ended rows are reused while others run."""
    draw, cache, model = random.Random(seed), TokenCache(NUM_PLACES, CPU), Model()
    running: dict[str, list[int]] = {}
    saved = 0
    for number in range(300):
        entered = []
        if running and draw.random() < 0.3:
            row = draw.choice(sorted(running))
            cache.leave([row])
            del running[row]
        for part in range(draw.randint(0, 2)):
            tokens = [draw.randint(1, 2) for _ in range(draw.randint(1, 8))]
            cost, row = cache.cost(tokens), f"row {number}.{part}"
            if cost.room + len(running) > cache.room:
                continue
            room = cache.room
            shared = cache.enter(row, tokens)
            assert (len(tokens) - shared, room - cache.room) == cost
            running[row], saved = tokens, saved + shared
            entered.append(row)
        grown = {row: [draw.randint(1, 2)] for row in running if row not in entered}
        if draw.random() < 0.7 and len(grown) <= cache.room:
            running |= {row: running[row] + tokens for row, tokens in grown.items()}
        else:
            grown = {}
        rows = grown | dict.fromkeys(entered, [])
        if rows:
            assert model.read(cache, rows) == [tuple(running[row]) for row in rows]
        held = {place for row in running for place in cache._running[row].places.tolist()}
        assert cache.room == NUM_PLACES - len(held)
    assert saved > 100
    cache.clear()
    assert (cache.room, cache._num_free) == (NUM_PLACES, NUM_PLACES)


def test_a_pass_describes_unread_and_earlier_tokens() -> None:
    cache = TokenCache(NUM_PLACES, CPU)
    cache.enter("a", [1, 2, 3])
    cache.read({"a": []})
    cache.enter("b", [5, 6])
    assert cache.cost([1, 2, 9]) == Cost(num_new=1, room=1)
    assert cache.enter("c", [1, 2, 9]) == 2
    step = cache.read({"a": [4], "b": [], "c": []})
    assert step.token_ids.tolist() == [4, 5, 6, 9]
    assert step.positions.tolist() == [3, 0, 1, 2]
    assert step.new.tolist() == [6, 3, 4, 5]
    assert step.seen.tolist() == [0, 1, 2, 6, 3, 4, 0, 1, 5]
    assert [tuple(piece) for piece in step.plan.pieces] == [(0, 1, 0, 4), (1, 3, 4, 6), (3, 4, 6, 9)]
    assert step.last.tolist() == [0, 2, 3]
    cache.leave(["a"])
    assert cache.room == NUM_PLACES - 5, "c still holds two of the tokens"
    assert cache.cost([1, 2, 3, 4, 7]) == Cost(num_new=1, room=3)


def test_memory_is_freed_only_between_rows() -> None:
    cache = TokenCache(NUM_PLACES, CPU)
    cache.enter("a", [1, 2, 3])
    step = cache.read({"a": []})
    step.attend(1, *torch.zeros(3, 3, 1, 2, 8), Scoring())
    cache.release()
    assert step.layers and cache.cost([1, 2, 3]).num_new == 1
    cache.leave(["a"])
    cache.release()
    assert not step.layers and cache.cost([1, 2, 3]).num_new == 3


def test_attention_over_passes_is_that_of_the_whole_rows() -> None:
    """Rows of 5 and 3 tokens in passes of (3, 1), (1, 1) and (1, 1) tokens, in float64."""
    generator = torch.Generator().manual_seed(0)
    rows = {
        name: [torch.randn(length, heads, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)]
        for name, length in (("a", 5), ("b", 3))
    }
    cache, at = TokenCache(NUM_PLACES, CPU), {"a": 0, "b": 0}
    found: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    cache.enter("a", [1, 2, 3])
    cache.enter("b", [4])
    for counts in ({"a": 3, "b": 1}, {"b": 1, "a": 1}, {"a": 1, "b": 1}):
        step = cache.read({row: [0] if at[row] else [] for row in counts})
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


@pytest.mark.parametrize("window", [None, 3])
def test_rows_of_very_different_lengths_are_those_of_the_whole_rows(window: int | None) -> None:
    """Ten rows decode together while an eleventh is read: each output is that of its row alone, in float64."""
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 2, 3, 5, 8, 70, 13, 64, 65, 130, 9]
    shapes = (4, 2, 2)
    cache = TokenCache(sum(lengths) + 12, CPU)
    rows = [
        [torch.randn(length + 1, heads, 8, dtype=torch.float64, generator=generator) for heads in shapes]
        for length in lengths
    ]
    *decoding, last = range(len(rows))
    scoring = Scoring(window=window)
    for number in decoding:
        cache.enter(str(number), [number] * lengths[number])
    step = cache.read({str(number): [] for number in decoding})
    step.attend(
        1, *(torch.cat([rows[number][part][:-1] for number in decoding])[:, None] for part in range(3)), scoring
    )
    cache.enter(str(last), [99] * lengths[last])
    order = [*reversed(decoding[:4]), last, *decoding[4:]]
    step = cache.read({str(number): [] if number == last else [7] for number in order})
    new = [
        [
            row[part][: lengths[last]] if number == last else row[part][-1:]
            for number, row in ((n, rows[n]) for n in order)
        ]
        for part in range(3)
    ]
    out = step.attend(1, *(torch.cat(parts)[:, None] for parts in new), scoring).flatten(1)
    sizes = [lengths[last] if number == last else 1 for number in order]
    for number, found in zip(order, out.split(sizes), strict=True):
        query, key, value = (part[: lengths[last]] if number == last else part for part in rows[number])
        scores = torch.einsum("tgqd,sgd->tgqs", query.unflatten(1, (2, 2)), key) / 8**0.5
        distance = torch.arange(len(query))[:, None] - torch.arange(len(query))
        seen = (distance >= 0) & (distance < (window or 1_000))
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        expected = torch.einsum("tgqs,sgd->tgqd", scores.softmax(-1), value).flatten(1)
        torch.testing.assert_close(found, expected[-len(found) :])
