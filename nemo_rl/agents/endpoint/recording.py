"""Turn the calls of a program into the conversations of its sample.

Each leaf of the tree ends one conversation, a row of the training batch. Invariant: each sampled token trains in
exactly one row: an answer that several conversations share has its log-probabilities in the first of them only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from nemo_rl.agents.endpoint.call_tree import Call, CallTree
from nemo_rl.data.interfaces import Message
from nemo_rl.experience.branches import Branch
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.models.generation.interfaces import VersionSpan

type Credit = Literal["all", "last"]


def record(sample: Trajectory, tree: CallTree, credit: Credit) -> list[Call]:
    """Write the conversations of a finished program into its sample.

    Args:
        sample: has only its prompt. If nothing was sampled, it stays as it is.
        tree: the calls.
        credit: "all": the reward trains all conversations; "last": the one that ended last.

    Returns:
        The calls in the order of the response turns of the sample.
    """
    leaves = tree.leaves()
    if not leaves:
        return []
    if credit == "last":
        leaves = [leaves[-1], *leaves[:-1]]
    trained: set[str] = set()
    rows = [_row(leaf, trained) for leaf in leaves]
    first = rows[0]
    sample.message_log, sample.prompt_length = first.message_log, first.prompt_length
    sample.weight_versions = first.weight_versions
    sample.branches = [
        Branch(row.message_log, row.prompt_length, row.weight_versions, trains=credit == "all") for row in rows[1:]
    ]
    sample.num_turns = len(tree.calls)
    return [call for row in rows for call in row.calls]


def spread_reward(
    sample: Trajectory, calls: Sequence[Call], call_rewards: Mapping[str, float], invalid_patterns: Sequence[str] = ()
) -> None:
    """Divide the reward of a sample over its response turns, and mark those with calls that were not understood.

    Args:
        sample: has its reward.
        calls: as `record` returns them.
        call_rewards: reward of some calls by their ids; the last turn has what is left of the sample's reward.
        invalid_patterns: texts that show a tool call that was not understood.
    """
    if sample.reward is None or not calls:
        return
    sample.turn_rewards = [float(call_rewards.get(call.id, 0.0)) for call in calls]
    sample.turn_rewards[-1] += sample.reward - sum(sample.turn_rewards)
    texts = [str(call.answer["content"]) for call in calls]
    sample.invalid_tool_call_turns = [any(pattern in text for pattern in invalid_patterns) for text in texts]


@dataclass(frozen=True)
class _Row:
    """One conversation."""

    message_log: list[Message]
    prompt_length: int
    """Tokens before the first answer that it trains."""
    weight_versions: list[VersionSpan]
    """Spans of the answers that it trains."""
    calls: list[Call]
    """The calls with these answers."""


def _row(leaf: Call, trained: set[str]) -> _Row:
    """Return the conversation that ends with a call.

    Args:
        leaf: the call.
        trained: ids of the calls that earlier rows train; those of this row are added.
    """
    log: list[Message] = []
    spans: list[VersionSpan] = []
    own: list[Call] = []
    position, prompt_length = 0, None
    for call in leaf.path:
        log.append(call.added)
        position += call.added["token_ids"].numel()
        answer = call.answer
        if call.id in trained:
            answer = {name: value for name, value in answer.items() if name != "generation_logprobs"}
        else:
            own.append(call)
            prompt_length = position if prompt_length is None else prompt_length
            spans += [VersionSpan(position + span.start, span.version) for span in call.weight_versions]
        log.append(answer)
        position += answer["token_ids"].numel()
    trained.update(call.id for call in own)
    return _Row(log, position if prompt_length is None else prompt_length, spans, own)
