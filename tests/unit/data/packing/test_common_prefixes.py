"""The tree of the beginnings that rows share, against a comparison of all pairs of rows."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.data.common_prefixes import Prefixes
from nemo_rl.data.packing import column_of, prefixes_of
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.batch_rows import STORED_ROWS, BatchRows, StoredRow, pack_rows, paths_of

pytestmark = pytest.mark.fast

NODE = 9
"""Fewest tokens between the ends of two nodes with which both are kept."""
words = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(lambda word: [n for n in word for _ in range(NODE)])
token_rows = st.lists(words, min_size=1, max_size=12)


def arrays(rows: list[list[int]]) -> list[Any]:
    return [np.array(row, dtype=np.int64) for row in rows]


def in_common(one: list[int], other: list[int]) -> int:
    """Return the number of tokens that two rows share: all in common but the last."""
    alike = 0
    while alike < min(len(one), len(other)) and one[alike] == other[alike]:
        alike += 1
    return max(alike - 1, 0)


def pairs(prefixes: Prefixes) -> dict[tuple[int, int], int]:
    """Return what any two rows share."""
    count = len(prefixes.rows)
    return {(a, b): prefixes.within([a, b]).shared[-1] for a in range(count) for b in range(a)}


@given(token_rows)
def test_any_two_rows_share_what_they_have_in_common(rows: list[list[int]]) -> None:
    prefixes = Prefixes.of(arrays(rows))
    assert sorted(prefixes.rows) == list(range(len(rows)))
    want = {(a, b): in_common(rows[a], rows[b]) for a in range(len(rows)) for b in range(a)}
    assert pairs(prefixes) == want
    paths = prefixes.paths()
    assert {(a, b): paths[a].shared(paths[b]) for a, b in want} == want


@given(token_rows)
def test_tokens_and_keys_are_those_of_the_nodes(rows: list[list[int]]) -> None:
    prefixes = Prefixes.of(arrays(rows))
    lengths = [len(row) for row in rows]
    nodes = {tuple(rows[a][: in_common(rows[a], rows[b])]) for a in range(len(rows)) for b in range(a)} - {()}
    above = [max((len(n) for n in nodes if len(n) < len(node) and node[: len(n)] == n), default=0) for node in nodes]
    of_nodes = sum(map(len, nodes)) - sum(above)
    most = [max((in_common(a, b) for m, b in enumerate(rows) if m != n), default=0) for n, a in enumerate(rows)]
    assert prefixes.tokens(lengths) == of_nodes + sum(lengths) - sum(most)
    assert prefixes.keys(lengths) == sum(map(len, nodes)) + sum(lengths)
    assert sorted(node.depth for node in prefixes.nodes[1:]) == sorted(map(len, nodes))


def test_a_node_that_costs_more_than_it_saves_is_left_out() -> None:
    start = list(range(100, 120))
    rows = [[*start, 1, 2], [*start, *range(5), 7], [*start, *range(5), 8], [*start, *range(12), 9], [3] * 4, [3] * 4]
    prefixes = Prefixes.of(arrays(rows))
    assert pairs(prefixes)[1, 0] == 19, "20 tokens in common, the last of which each row has"
    assert pairs(prefixes)[2, 1] == 19, "24 are shared, but the 5 more are too few for a node"
    assert pairs(prefixes)[5, 4] == 0, "equal rows, too short"
    long = list(range(1000))
    far = Prefixes.of(arrays([[*long, 1], [*long, *range(20), 5], [*long, *range(20), 6], [*long, *range(99), 7]]))
    assert pairs(far)[2, 1] == 999, "20 tokens are too few for the keys of 1019"


def test_the_column_of_a_microbatch_gives_its_tree() -> None:
    tokens = arrays([[*range(20), 1], [*range(30), 2], [*range(30), 3], list(range(50, 80)), [*range(20), 4]])
    prefixes = Prefixes.of(tokens)
    column = column_of(prefixes, [4, 2, 3, 1])
    assert column.shape == (4, 2) and column.dtype == torch.int64
    read = prefixes_of(column)
    assert [[4, 2, 3, 1][row] for row in read.rows] == prefixes.within([4, 2, 3, 1]).rows
    assert read.shared == prefixes.within([4, 2, 3, 1]).shared
    assert pairs(read)[3, 1] == 29 and pairs(read)[1, 0] == 19 and pairs(read)[2, 0] == 0


def test_stored_rows_share_within_their_object() -> None:
    """Two objects with a prompt of 20 tokens; the second conversation of each continues an answer of the first."""
    logs = []
    for start in (0, 100):
        prompt, answer = torch.arange(start, start + 20), torch.arange(10)
        other = torch.arange(30, 40)
        logs.append(
            [
                [{"role": "user", "content": "", "token_ids": torch.cat([prompt, *tail])}]
                for tail in ([answer, torch.tensor([1])], [answer, torch.tensor([2, 3])], [other])
            ]
        )
    stored = []
    for name, of_object in zip("ab", logs, strict=True):
        rows: Any = name
        stored += [StoredRow(rows, n, 40, 0, path) for n, path in enumerate(paths_of(pack_rows(of_object)))]
    lengths = torch.tensor([31, 32, 30, 31, 32, 30, 1])
    batch = BatchedDataDict({STORED_ROWS: [*stored, stored[0]], "input_lengths": lengths})
    found = pairs(BatchRows.of(batch).prefixes())
    assert (found[1, 0], found[2, 0], found[2, 1]) == (29, 19, 19)
    assert (found[4, 3], found[5, 4]) == (29, 19)
    assert found[3, 0] == found[6, 0] == found[6, 1] == 0, "another object; a filler row, which is cut"
    some = BatchRows.of(batch.select_indices([2, 1, 6])).prefixes()
    assert pairs(some)[1, 0] == 19
