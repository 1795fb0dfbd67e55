"""Trajectories without their tokens: what the driver keeps of rollouts that a runner actor has played.

The driver sees lengths, rewards, versions and outcomes. Tokens and texts are in the object store, one object for each
group; the driver owns the references, so they outlive the runner.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nemo_rl.data.interfaces import Message
from nemo_rl.data.stored_rows import (
    NUM_WRITTEN,
    STORED_ROWS,
    PackedRows,
    SharedPrompt,
    StoredRow,
    fetched,
    pack_rows,
    shared_prompts,
)
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.trajectory import Rollouts, StoredTokens, Trajectory

if TYPE_CHECKING:
    from ray import ObjectRef


@dataclass(frozen=True)
class TokenCount:
    """Takes the place of tokens that are stored elsewhere.

    Attributes:
        count: their number.
    """

    count: int

    def numel(self) -> int:
        """Return the number of tokens, as a tensor does."""
        return self.count


def split(samples: Sequence[Trajectory], *, keeps_texts: bool) -> tuple[list[Trajectory], PackedRows]:
    """Divide the samples of a group into summaries for the driver, and tokens with texts.

    Args:
        samples: finished samples.
        keeps_texts: the summaries have the texts of all messages; False: of those before the first response.
    """
    packed = pack_rows([sample.message_log for sample in samples])
    prompts = shared_prompts(packed)
    return [_summary(sample, prompt, keeps_texts) for sample, prompt in zip(samples, prompts, strict=True)], packed


def _summary(sample: Trajectory, prompt: SharedPrompt, keeps_texts: bool) -> Trajectory:
    log: list[Any] = []
    is_prompt = True
    for message in sample.message_log:
        is_prompt = is_prompt and "generation_logprobs" not in message
        counted: dict[str, Any] = {"role": message["role"], "token_ids": TokenCount(message["token_ids"].numel())}
        if "generation_logprobs" in message:
            counted["generation_logprobs"] = counted["token_ids"]
        log.append(counted | {"content": message["content"] if keeps_texts or is_prompt else ""})
    return replace(
        sample,
        message_log=log,
        extra_env_info=None,
        episode=None,
        chat=None,
        served_by=None,
        stored=StoredTokens(prompt),
    )


def located(rollouts: Rollouts, rows: "ObjectRef[Any]") -> Rollouts:
    """Tell the summaries of a group where its tokens are; whole samples stay as they are."""
    for sample in rollouts.trajectories:
        if sample.stored is not None:
            sample.stored = replace(sample.stored, rows=rows)
    return rollouts


def whole(samples: Sequence[Trajectory]) -> list[Trajectory]:
    """Get the tokens and texts of samples from the object store; samples that have them are returned as they are."""
    places = [None if sample.stored is None else sample.stored.rows for sample in samples]
    packed = fetched([place for place in places if place is not None])
    return [
        sample if place is None else _with_tokens(sample, packed[place])
        for sample, place in zip(samples, places, strict=True)
    ]


def _with_tokens(sample: Trajectory, packed: PackedRows) -> Trajectory:
    start, log = packed.start_of(sample.sample_index), []
    texts = packed.messages_of(sample.sample_index)
    for counted, text in zip(sample.message_log, texts, strict=True):
        end = start + counted["token_ids"].numel()
        message: Any = dict(text, token_ids=torch.from_numpy(packed.token_ids[start:end].astype(np.int64)))
        if "generation_logprobs" in counted:
            message["generation_logprobs"] = torch.from_numpy(packed.logprobs[start:end].copy())
        log.append(message)
        start = end
    return replace(sample, message_log=log, stored=None)


def messages_of(trajectory: Trajectory) -> list[Message]:
    """Return the messages of a trajectory without tokens, from the object store if they are there."""
    if trajectory.stored is None or trajectory.stored.rows is None:
        return trajectory.turns
    packed = fetched([trajectory.stored.rows])[trajectory.stored.rows]
    return packed.messages_of(trajectory.sample_index)


def lay_out(trajectories: Sequence[Trajectory], pad_token_id: int) -> BatchedDataDict[Any]:
    """Return the rows of a batch in the order of the trajectories, whose tokens are all stored."""
    lengths = [trajectory.length for trajectory in trajectories]
    width = max(lengths)
    rows = []
    for trajectory in trajectories:
        stored = trajectory.stored
        assert stored is not None and stored.rows is not None, "a runner has stored the tokens"
        rows.append(StoredRow(stored.rows, trajectory.sample_index, width, pad_token_id, stored.prompt))
    return BatchedDataDict(
        {
            "input_lengths": torch.tensor(lengths, dtype=torch.int64),
            NUM_WRITTEN: torch.tensor([trajectory.response_length for trajectory in trajectories]),
            STORED_ROWS: rows,
        }
    )
