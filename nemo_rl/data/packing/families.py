"""Finds rows that begin with the same prompt by their tokens: samples of a group, answers of a pair.

Invariant: the last token of a prompt stays in each row. The token after it is the first one that counts, so each row
scores only its own tokens, and no gradient depends on the order of the rows that share a token.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl.data.model_rows import ROW_INPUTS
from nemo_rl.data.stored_rows import STORED_ROWS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

_LEAST_TOKENS = 8
"""Fewest tokens of a shared prompt; below this, the additional keys cost more than sharing saves."""


@dataclass(frozen=True)
class Family:
    """Rows that begin with the same tokens.

    Attributes:
        rows: their indices in the batch, in order.
        shared: number of tokens at the beginning that all of them share; 0 for a single row.
    """

    rows: list[int]
    shared: int

    def tokens(self, lengths: Sequence[int]) -> int:
        """Return the number of tokens laid out for the family; `lengths` are those of all rows of the batch."""
        return self.shared + sum(lengths[row] - self.shared for row in self.rows)

    def keys(self, lengths: Sequence[int]) -> int:
        """Return the number of attention keys: those of the prompt, and of each row with the prompt before it."""
        prompt = self.shared if len(self.rows) > 1 else 0
        return prompt + sum(lengths[row] for row in self.rows)


def find_families(rows: BatchedDataDict[Any]) -> list[Family]:
    """Group rows by their prompt: the tokens before the first sampled token, without the last of them.

    Args:
        rows: `input_ids [b, T]`, and `token_mask [b, T]`, 1 on tokens that the policy sampled, or stored rows. Without
            the mask the ends of prompts are unknown, and each row is its own family. So is each row with further inputs
            (`data.model_rows`), because the model expects them once for each row.

    Returns:
        Every row in one family, families in the order of their first rows.
    """
    if STORED_ROWS in rows:
        return _families(
            [row.prompt.length for row in rows[STORED_ROWS]], [row.prompt.digest for row in rows[STORED_ROWS]]
        )
    if "token_mask" not in rows or ROW_INPUTS in rows:
        return [Family([row], 0) for row in range(rows.size)]
    written = rows["token_mask"] > 0
    shared = (written.int().argmax(dim=1) - 1).clamp(min=0).tolist()
    tokens = rows["input_ids"].numpy()
    return _families(shared, [ids[:length].tobytes() for ids, length in zip(tokens, shared, strict=True)])


def _families(shared: Sequence[int], prompts: Sequence[bytes]) -> list[Family]:
    by_prompt: dict[Hashable, list[int]] = {}
    for row, (prompt, length) in enumerate(zip(prompts, shared, strict=True)):
        by_prompt.setdefault(prompt if length >= _LEAST_TOKENS else row, []).append(row)
    return [Family(found, shared[found[0]] if len(found) > 1 else 0) for found in by_prompt.values()]


def divide_families(
    families: Sequence[Family], lengths: Sequence[int], most_tokens: int, most_keys: int | None = None
) -> Iterator[Family]:
    """Divide families so that each has at most the given tokens and keys, if its rows do; keep the order of rows."""
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
