"""Play stored samples again with an environment: the turns are the stored ones, and the rewards are new.

Invariant: the environment gets what it would get in a run: the episode is opened with the row's data, each response is
one step, metadata passes from step to step, and the episode is closed.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from nemo_rl.commands.regrade.stored_samples import StoredSample
from nemo_rl.data.interfaces import DatumSpec, Message
from nemo_rl.data.messages.content import content_text
from nemo_rl.environments.interfaces import EpisodeStart, StepResult
from nemo_rl.experience.penalties import AnswerReview
from nemo_rl.experience.samples import EnvironmentPort

_AT_ONCE = 512


@dataclass
class Regraded:
    """A stored sample with its new reward."""

    sample: StoredSample
    environment: str
    """Name of the environment that computed the new reward."""
    reward: float | None = None
    """New reward, or None if it could not be computed."""
    components: dict[str, float] = field(default_factory=dict)
    """Named components of the new reward."""
    error: str | None = None
    """Reason why there is no new reward."""
    diverged: str | None = None
    """Difference between the new and the stored episode, or None if there is none."""
    penalties: dict[str, list[int]] | None = None
    """Penalties found in the stored tokens, as `Trajectory.penalties`; None for a sample without stored tokens, such as
    one of a validation, or of a run without penalties."""

    @property
    def penalized_reward(self) -> float | None:
        """New reward for training, at most 0 if the sample has penalties (`Trajectory.penalized_reward`)."""
        is_penalized = self.penalties is not None and any(self.penalties.values())
        return min(self.reward, 0.0) if is_penalized and self.reward is not None else self.reward

    def fail(self, reason: str) -> "Regraded":
        """Store the reason why there is no reward, and return self."""
        self.reward, self.error = None, reason
        return self


async def replay_all(
    samples: Sequence[tuple[StoredSample, DatumSpec]], name: str, environment: EnvironmentPort
) -> list[Regraded]:
    """Play samples again, many at the same time.

    Args:
        samples: stored samples, each with the datum of its row.
        environment: environment that rewards the samples.
    """
    places = asyncio.Semaphore(_AT_ONCE)

    async def play(sample: StoredSample, datum: DatumSpec) -> Regraded:
        async with places:
            return await replay(sample, datum, name, environment)

    return list(await asyncio.gather(*(play(*pair) for pair in samples)))


async def replay(sample: StoredSample, datum: DatumSpec, name: str, environment: EnvironmentPort) -> Regraded:
    """Play one sample again."""
    graded = Regraded(sample, name)
    if sample.row.get("outcome") == "prompt_too_long":
        return graded.fail("its prompt was too long for a response")
    if "branch" in sample.row:
        return graded.fail("it has several conversations, which do not say in which order its turns were taken")
    start = await environment.open_episode(datum["extra_env_info"])
    metadata = start.metadata
    try:
        prompt = _prompt(sample, datum, start, environment.reads_chat)
        if isinstance(prompt, str):
            return graded.fail(prompt)
        turns = list(sample.row["content"][_num_prompt_messages(datum, start) :])
        for end in range(1, len(turns) + 1, 2):
            step = await environment.step([*prompt, *_plain(turns[:end])], metadata)
            metadata = step.metadata if step.metadata is not None else metadata
            if not _absorb(graded, step) or _is_over(graded, step, turns[end:]):
                break
        return graded if turns else graded.fail("it has no response")
    finally:
        await environment.close_episode(metadata)


def _num_prompt_messages(datum: DatumSpec, start: EpisodeStart[Any]) -> int:
    return 1 if start.observation is not None else len(datum["message_log"])


def _prompt(
    sample: StoredSample, datum: DatumSpec, start: EpisodeStart[Any], reads_chat: bool
) -> list[dict[str, Any]] | str:
    """Return the messages of the prompt as the environment reads them, or why the sample cannot be played again."""
    if start.error is not None:
        return f"its episode could not be opened: {start.error}"
    stored = sample.row["content"][: _num_prompt_messages(datum, start)]
    if start.observation is None and _texts(stored) != _texts(datum["message_log"]):
        return f"row {sample.row['idx']} of the data has another prompt than the sample; the data is not the run's"
    if reads_chat and "chat" in datum:
        return _plain([*datum["chat"]["messages"], *([start.observation] if start.observation else [])])
    return _plain(stored)


def _texts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the texts of messages as stored samples have them, also of messages whose images were not read."""
    return [content_text(_with_placeholders(message["content"])) for message in messages]


def _with_placeholders(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    image = {"type": "text", "text": "<image>"}
    return [image if isinstance(part, Mapping) and part.get("type") == "image" else part for part in content]


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _absorb(graded: Regraded, step: StepResult) -> bool:
    """Add the reward of a step, or return False if it has none."""
    if step.error is not None or step.reward is None:
        graded.fail(step.error or "the environment returned no reward")
        return False
    components = step.reward if isinstance(step.reward, dict) else {}
    for name, value in components.items():
        graded.components[name] = graded.components.get(name, 0.0) + value
    earned = sum(components.values()) if isinstance(step.reward, dict) else step.reward
    graded.reward = (graded.reward or 0.0) + earned
    return True


def _is_over(graded: Regraded, step: StepResult, later: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the episode ends here, and store where it differs from the stored episode."""
    if step.terminated or len(later) < 2:
        if step.terminated and len(later) > 1:
            graded.diverged = f"the episode ends {len(later) // 2} responses earlier than the stored one"
        return True
    if _texts([step.observation]) != _texts(later[:1]):
        graded.diverged = "an observation differs from the stored one"
    return False


def review_again(graded: Sequence[Regraded], review: AnswerReview) -> None:
    """Review the samples that have a reward and stored tokens, as in the run, and store their penalties."""
    for each in graded:
        row = each.sample.row
        if each.reward is not None and "token_ids" in row:
            each.penalties = review.judge(row["token_ids"], turn_spans(row["token_loss_mask"])).penalties


def turn_spans(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first token and the end of each sampled turn. Tokens between two turns are the environment's.

    Args:
        mask: for each token of the sequence, 1 if it was sampled and 0 if not.

    Example:
        >>> turn_spans([0, 1, 1, 0, 1])
        [(1, 3), (4, 5)]
    """
    spans, start = [], 0
    for is_sampled, tokens in groupby(mask):
        end = start + len(list(tokens))
        if is_sampled:
            spans.append((start, end))
        start = end
    return spans
