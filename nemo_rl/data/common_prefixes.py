"""Find the common prefixes of rows as a tree. Answers to one prompt and branches of one sample have such prefixes.

    row 0: p a b          root ─┬─ p ─┬─ a ─┬─ b     (row 0)
    row 1: p a c    ─►          │     │     └─ c     (row 1)
    row 2: p d                  │     └─ d           (row 2)
    row 3: e                    └─ e                 (row 3)

The tree is stored as two lists: an order in which rows with a common prefix follow each other, and the number of tokens
that each row shares with the row before it. The number of tokens that any two rows share is the minimum of these
numbers between the two rows, so the lists for some rows follow from those for all rows.

Invariant: the last token of a common prefix is not shared, but belongs to each row. So each row has at least one token
of its own. The token after a shared token is the same in all rows that share it, so only one score is needed for it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import batched, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_LEAST_TOKENS = 8
"""Smallest number of tokens of a node. A smaller node would cost more in attention keys than it saves."""
_LEAST_SHARE = 1 / 32
"""Smallest number of tokens of a node as a share of its keys, for the same reason."""


class Node(NamedTuple):
    """Tokens that several rows share."""

    depth: int
    """Number of tokens from the start of the rows to the end of the node, which is also its number of keys."""
    parent: int
    """Index of the parent node. The root has index 0 and no tokens."""
    first: int
    """Position of the node's first row in the order of the rows."""


class Path(NamedTuple):
    """The location of a row in a tree. Two paths are enough to compute how many tokens their rows share."""

    place: int
    """Position of the row in the order of the rows."""
    nodes: tuple[tuple[int, int], ...]
    """`(depth, first)` of each node on the path from the root to the row (`Node`)."""

    def shared(self, other: "Path") -> int:
        """Return the number of tokens that both rows share."""
        return max((depth for depth, _ in set(self.nodes) & set(other.nodes)), default=0)


@dataclass(frozen=True)
class Prefixes:
    """The tree of rows, as the module docstring describes."""

    rows: list[int]
    """Indices of the rows in an order in which rows with a common prefix are adjacent."""
    shared: list[int]
    """Number of tokens that each row in this order shares with the row before it, or 0 for the first row."""

    @classmethod
    def of(cls, tokens: Sequence[NDArray[np.integer]]) -> "Prefixes":
        """Find the tree of rows of tokens (of equal dtype), without nodes that cost more than they save."""
        keys = [row.tobytes() for row in tokens]
        rows = sorted(range(len(tokens)), key=keys.__getitem__)
        shared = [0, *(max(_num_equal(tokens[a], tokens[b]) - 1, 0) for a, b in pairwise(rows))]
        return cls(rows, shared[: len(rows)])._worthwhile()

    @classmethod
    def of_groups(cls, tokens: Sequence[NDArray[np.integer]], groups: Sequence[int]) -> "Prefixes":
        """Find the tree of rows in which only rows of the same group share tokens. Rows of group -1 come first."""
        members: dict[int, list[int]] = {-1: []}
        for row, group in enumerate(groups):
            members.setdefault(group, []).append(row)
        trees = []
        for rows in members.values():
            own = cls.of([tokens[row] for row in rows])
            trees.append(cls([rows[row] for row in own.rows], own.shared))
        return cls.side_by_side(trees)

    @classmethod
    def side_by_side(cls, trees: Sequence["Prefixes"]) -> "Prefixes":
        """Return the tree that combines several trees. Rows of different trees do not share tokens."""
        return cls([row for tree in trees for row in tree.rows], [n for tree in trees for n in tree.shared])

    @classmethod
    def alone(cls, count: int) -> "Prefixes":
        """Return the tree of rows that do not share tokens."""
        return cls(list(range(count)), [0] * count)

    @property
    def is_flat(self) -> bool:
        """Return True if no rows share tokens."""
        return not any(self.shared)

    @cached_property
    def _place_of(self) -> dict[int, int]:
        return {row: place for place, row in enumerate(self.rows)}

    def within(self, rows: Collection[int]) -> "Prefixes":
        """Return the tree of the given rows."""
        places = sorted(self._place_of[row] for row in rows)
        shared = [0, *(min(self.shared[a + 1 : b + 1]) for a, b in pairwise(places))]
        return Prefixes([self.rows[place] for place in places], shared[: len(places)])

    def between_multiples(self, size: int) -> "Prefixes":
        """Return the tree in which rows share tokens only within each group of `size` consecutive indices."""
        if size == 1:
            return self
        return self.side_by_side([self.within(group) for group in batched(range(len(self.rows)), size)])

    def part(self, start: int, stop: int) -> "Prefixes":
        """Return the tree of the rows at positions `start` to `stop - 1`."""
        return Prefixes(self.rows[start:stop], [0, *self.shared[start + 1 : stop]])

    def tokens(self, lengths: Sequence[int]) -> int:
        """Return the number of tokens in the layout of the rows, given the lengths of all rows of the batch."""
        return sum(lengths[row] for row in self.rows) - sum(self.shared)

    def keys(self, lengths: Sequence[int]) -> int:
        """Return the number of attention keys: the sum of the tokens up to the end of each node and of each row."""
        return sum(lengths[row] for row in self.rows) + sum(node.depth for node in self.nodes)

    @property
    def nodes(self) -> list[Node]:
        """The nodes, starting with the root."""
        return self._tree[0]

    @property
    def node_of_place(self) -> list[int]:
        """The index of the deepest node of the row at each position, or 0 (the root) if the row shares no tokens."""
        nodes, between = self._tree
        after = [*between[1:], 0]
        return [max(pair, key=lambda node: nodes[node].depth) for pair in zip(between, after, strict=True)]

    @cached_property
    def _tree(self) -> tuple[list[Node], list[int]]:
        """The nodes, and for each position the deepest node that its row shares with the previous row."""
        depths, parents, firsts, between = [0], [0], [0], []
        open_nodes = [0]
        for place, depth in enumerate(self.shared):
            below = None
            while depths[open_nodes[-1]] > depth:
                below = open_nodes.pop()
            if depths[open_nodes[-1]] < depth:
                depths.append(depth)
                parents.append(open_nodes[-1])
                firsts.append(place - 1 if below is None else firsts[below])
                if below is not None:
                    parents[below] = len(depths) - 1
                open_nodes.append(len(depths) - 1)
            between.append(open_nodes[-1])
        return [Node(*node) for node in zip(depths, parents, firsts, strict=True)], between

    def paths(self) -> list[Path]:
        """Return the path of each row, in the order of row indices."""
        found = {}
        for place, (row, node) in enumerate(zip(self.rows, self.node_of_place, strict=True)):
            on_way = []
            while node:
                on_way.append((self.nodes[node].depth, self.nodes[node].first))
                node = self.nodes[node].parent
            found[row] = Path(place, tuple(reversed(on_way)))
        return [found[row] for row in sorted(found)]

    def _worthwhile(self) -> "Prefixes":
        """Return the tree without nodes that cost more than they save. Their tokens are no longer shared."""
        nodes, between = self._tree
        kept = [0] * len(nodes)
        for number in sorted(range(1, len(nodes)), key=lambda node: nodes[node].depth):
            above, depth = kept[nodes[number].parent], nodes[number].depth
            kept[number] = depth if depth - above >= max(_LEAST_TOKENS, _LEAST_SHARE * depth) else above
        return Prefixes(self.rows, [kept[node] for node in between])


def _num_equal(one: NDArray[np.integer], other: NDArray[np.integer]) -> int:
    """Return the length of the common prefix of two rows in tokens."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
