"""Rows that begin with the same prompt, the samples of a group and the answers of a pair, found by their tokens.

Invariant: the last token of a prompt stays with each row. Its successor is the first that counts, so each row scores
tokens of its own only, and no gradient depends on the order in which rows meet at one token.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl.data.model_rows import ROW_INPUTS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

_LEAST_TOKENS = 8
"""Prompts of fewer tokens are not worth the keys that are laid out for them."""


@dataclass(frozen=True)
class Family:
    """Rows that begin alike.

    Attributes:
        rows: their places in the batch, in order.
        shared: tokens that all of them begin with; 0 for a row by itself.
    """

    rows: list[int]
    shared: int

    def tokens(self, lengths: Sequence[int]) -> int:
        """Tokens laid out for them, of rows with these lengths in the batch."""
        return self.shared + sum(lengths[row] - self.shared for row in self.rows)

    def keys(self, lengths: Sequence[int]) -> int:
        """Keys that attention lays out for them: the prompt's, and each row's with the prompt before it."""
        prompt = self.shared if len(self.rows) > 1 else 0
        return prompt + sum(lengths[row] for row in self.rows)


def find_families(rows: BatchedDataDict[Any]) -> list[Family]:
    """Group rows by their prompt: what stands before the first token that the policy wrote, but for its last token.

    Args:
        rows: `input_ids [b, T]`, and `token_mask [b, T]`, 1 on tokens that the policy wrote. Without the mask nothing
            says where prompts end, and each row is by itself. So is each row with further inputs (`data.model_rows`),
            because the model expects them once for each row.

    Returns:
        Every row in one family, families in the order of their first rows.
    """
    if "token_mask" not in rows or ROW_INPUTS in rows:
        return [Family([row], 0) for row in range(rows.size)]
    written = rows["token_mask"] > 0
    shared = (written.int().argmax(dim=1) - 1).clamp(min=0).tolist()
    by_prompt: dict[Hashable, list[int]] = {}
    for row, (ids, length) in enumerate(zip(rows["input_ids"].numpy(), shared, strict=True)):
        prompt = ids[:length].tobytes() if length >= _LEAST_TOKENS else row
        by_prompt.setdefault(prompt, []).append(row)
    return [Family(found, shared[found[0]] if len(found) > 1 else 0) for found in by_prompt.values()]


def divide_families(
    families: Sequence[Family], lengths: Sequence[int], most_tokens: int, most_keys: int | None = None
) -> Iterator[Family]:
    """Families of at most so many tokens and keys each, where rows allow it; rows of a family stay in order."""
    for family in families:
        taken: list[int] = []
        tokens = keys = family.shared
        for row in family.rows:
            own = lengths[row] - family.shared
            too_many = most_keys is not None and keys + lengths[row] > most_keys
            if taken and (tokens + own > most_tokens or too_many):
                yield Family(taken, family.shared)
                taken, tokens, keys = [], family.shared, family.shared
            taken.append(row)
            tokens += own
            keys += lengths[row]
        yield Family(taken, family.shared)
