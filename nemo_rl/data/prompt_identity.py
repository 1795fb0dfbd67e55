"""Identify prompts by their content, so that their random numbers do not depend on their places.

Invariant: the identity of a prompt depends only on the prompt and on the number of equal prompts before it. Other
batches and other orders of different prompts give the same identities.
"""

import hashlib
import json
from collections import Counter
from typing import Any

from nemo_rl.data.model_rows import RowInputs
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


class PromptIdentities:
    """Identify the prompts of consecutive batches."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def of(self, prompts: BatchedDataDict[Any]) -> tuple[str, ...]:
        """Return the identity of each prompt of the next batch.

        Args:
            prompts: collated `DatumSpec` rows.
        """
        identities = []
        for row in range(prompts.size):
            digest = _digest(prompts, row)
            identities.append(f"{digest}-{self._seen[digest]}")
            self._seen[digest] += 1
        return tuple(identities)


def _digest(prompts: BatchedDataDict[Any], row: int) -> str:
    """Return a digest of a prompt's messages, images, environment and data for the environment."""
    inputs: list[RowInputs | None] | None = prompts.get("row_inputs")
    own = inputs[row] if inputs else None
    content = [
        prompts["task_name"][row],
        [[message["role"], message["token_ids"].tolist()] for message in prompts["message_log"][row]],
        [] if own is None or own.images is None else [image.digest for image in own.images.images],
        prompts["extra_env_info"][row],
    ]
    text = json.dumps(content, skipkeys=True, default=lambda value: type(value).__name__)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
