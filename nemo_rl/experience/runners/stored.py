"""Keep trajectories without their tokens in the driver, for rollouts of a runner actor.

The driver has lengths, rewards, versions and outcomes. Tokens and texts are in the object store, where one object may
hold the tokens of several groups. The driver owns the references, so the objects are not lost when the runner dies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nemo_rl.data.interfaces import Message
from nemo_rl.data.routed_experts import ROUTED_EXPERTS
from nemo_rl.experience.branches import StoredTokens
from nemo_rl.experience.trajectory import Rollouts, Trajectory
from nemo_rl.models.batch_rows import (
    NUM_WRITTEN,
    STORED_ROWS,
    PackedRows,
    StoredRow,
    fetched,
    pack_rows,
    paths_of,
)

if TYPE_CHECKING:
    from ray import ObjectRef


@dataclass(frozen=True)
class TokenCount:
    """Placeholder for tokens that are in the object store."""

    count: int
    """Number of tokens."""

    def numel(self) -> int:
        """Return the number of tokens, as a tensor does."""
        return self.count


def split(groups: Sequence[Sequence[Trajectory]], *, reads_collections: bool) -> tuple[list[Trajectory], PackedRows]:
    """Divide samples into summaries for the driver, and tokens with texts for the object store.

    Args:
        groups: Finished samples of each prompt.
        reads_collections: Whether an environment reads whole collections. If so, the summaries contain the texts of all
            messages and the environment's metadata. If not, they contain only the texts before the first response.
    """
    samples = [sample for group in groups for sample in group]
    packed = pack_rows([log for sample in samples for log in sample.logs])
    of_rows = [number for number, group in enumerate(groups) for sample in group for _ in sample.logs]
    places = (StoredTokens(path, index) for index, path in enumerate(paths_of(packed, of_rows)))
    return [_summary(sample, places, reads_collections) for sample in samples], packed


def _summary(sample: Trajectory, places: Iterator[StoredTokens], reads_collections: bool) -> Trajectory:
    """Return a sample without tokens. Its conversations get the next locations of `places`."""
    num_prompt = next((n for n, m in enumerate(sample.message_log) if "generation_logprobs" in m), None)
    return replace(
        sample,
        message_log=_counted(sample.message_log, None if reads_collections else num_prompt),
        extra_env_info=sample.extra_env_info if reads_collections else None,
        episode=None,
        chat=None,
        served_by=None,
        stored=next(places),
        branches=[
            replace(
                branch, message_log=_counted(branch.message_log, None if reads_collections else 0), stored=next(places)
            )
            for branch in sample.branches
        ],
    )


def _counted(log: Sequence[Message], num_texts: int | None) -> list[Any]:
    """Return messages with counts instead of tokens. The first `num_texts` keep their texts. If None, all keep them."""
    counted = []
    for number, message in enumerate(log):
        count = TokenCount(message["token_ids"].numel())
        text = message["content"] if num_texts is None or number < num_texts else ""
        written = {"generation_logprobs": count} if "generation_logprobs" in message else {}
        counted.append({"role": message["role"], "token_ids": count, **written, "content": text})
    return counted


def located(rollouts: Rollouts, rows: "ObjectRef[Any]") -> Rollouts:
    """Add the reference of the tokens to the summaries of a group. Samples with tokens are not changed."""
    for sample in rollouts.trajectories:
        for conversation in sample.conversations:
            if conversation.stored is not None:
                conversation.stored = replace(conversation.stored, rows=rows)
    return rollouts


def whole(samples: Sequence[Trajectory]) -> list[Trajectory]:
    """Return samples with tokens and texts, fetched from the object store if necessary."""
    places = [None if sample.stored is None else sample.stored.rows for sample in samples]
    packed = fetched([place for place in places if place is not None])
    return [
        sample if place is None else _with_tokens(sample, packed[place])
        for sample, place in zip(samples, places, strict=True)
    ]


def _with_tokens(sample: Trajectory, packed: PackedRows) -> Trajectory:
    branches = [
        replace(branch, message_log=_messages(branch.message_log, branch.stored, packed), stored=None)
        for branch in sample.branches
    ]
    log = _messages(sample.message_log, sample.stored, packed)
    return replace(sample, message_log=log, stored=None, branches=branches)


def _messages(counted_log: Sequence[Any], place: StoredTokens | None, packed: PackedRows) -> list[Message]:
    """Return the messages of one conversation with their tokens and texts."""
    assert place is not None, "the conversations of a sample are stored together"
    start, log = packed.start_of(place.index), []
    for counted, text in zip(counted_log, packed.messages_of(place.index), strict=True):
        end = start + counted["token_ids"].numel()
        message: Any = dict(text, token_ids=torch.from_numpy(packed.token_ids[start:end].astype(np.int64)))
        if "generation_logprobs" in counted:
            message["generation_logprobs"] = torch.from_numpy(packed.logprobs[start:end].copy())
        if packed.experts is not None:
            message[ROUTED_EXPERTS] = torch.from_numpy(packed.experts[start:end].copy())
        log.append(message)
        start = end
    return log


def messages_of(trajectory: Trajectory) -> list[Message]:
    """Return the messages of a row without tokens. Missing texts are fetched from the object store."""
    if trajectory.stored is None or trajectory.stored.rows is None:
        return trajectory.turns
    packed = fetched([trajectory.stored.rows])[trajectory.stored.rows]
    return packed.messages_of(trajectory.stored.index)


def stored_columns(trajectories: Sequence[Trajectory], width: int, pad_token_id: int) -> dict[str, Any]:
    """Return the columns of stored rows, one row for each trajectory (`StoredRow`)."""
    rows = []
    for trajectory in trajectories:
        stored = trajectory.stored
        assert stored is not None and stored.rows is not None, "a runner has stored the tokens"
        rows.append(StoredRow(stored.rows, stored.index, width, pad_token_id, stored.path))
    return {STORED_ROWS: rows, NUM_WRITTEN: torch.tensor([trajectory.response_length for trajectory in trajectories])}
