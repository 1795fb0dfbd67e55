"""Write conversations and rewards to JSONL files, and show a few of them on a terminal.

`train_data_step<N>.jsonl` has one line per sample with texts, tokens, log-probabilities and advantages.
`val_data_step<N>.jsonl` has one line per validation sample. A sample with branches has a line for each conversation,
with the conversation's number as `branch`. A conversation with images has them as `images` (`logged_images`).
Invariants: an incomplete file never has its final name, and a resumed run overwrites the files of a killed one. A full
disk does not end the run.
"""

import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.data.messages.content import with_texts
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.logged_images import ImageLog, image_text, logged_images, placed
from nemo_rl.experience.rows import rows_of
from nemo_rl.experience.runners.stored import messages_of, whole
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.files.writing import OptionalOutput, write_atomically
from nemo_rl.host.terminal import is_terminal
from nemo_rl.models.batch_rows import BatchRows

logger = logging.getLogger(__name__)

_SHOWN_TURNS, _SHOWN_CHARS, _SHOWN_IMAGES = 2, 60, 3
_DECIMALS = 6
_ROWS_AT_ONCE = 256
_PER_TOKEN = ("generation_logprobs", "prev_logprobs", "advantages", "reference_policy_logprobs", "values", "returns")


@dataclass(frozen=True)
class ShownAnswers:
    """Show answers of some steps to a person who watches the run."""

    number: int
    """Number of answers per step. Half of them have the highest and half the lowest rewards."""
    period: int
    """Number of steps between two steps whose answers are shown. Answers of the first step are shown too."""

    def show(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Log a line for each answer if the step's answers are due and standard error is a terminal."""
        if (step - 1) % self.period or not is_terminal(sys.stderr):
            return
        graded = [(each.reward, each) for each in trajectories if each.reward is not None]
        graded.sort(key=lambda pair: pair[0], reverse=True)
        worst = min(self.number, len(graded)) // 2
        best = min(self.number, len(graded)) - worst
        for reward, trajectory in graded[:best] + graded[len(graded) - worst :]:
            logger.info("  reward %.3g: %s", reward, _in_one_line(trajectory))


def _in_one_line(trajectory: Trajectory) -> str:
    """Return the ends of the last prompt and the last answer in one line, with the first images of the prompt."""
    messages, images = messages_of(trajectory), logged_images(_with_tokens(trajectory))
    texts = []
    for text, numbers in placed(messages, images):
        if text:
            line = " ".join(text.split())
            end = line if len(line) <= _SHOWN_CHARS else "..." + line[-_SHOWN_CHARS:]
            names = [image_text(number, images[number]) for number in numbers[:_SHOWN_IMAGES]]
            texts.append(" ".join([*(name for name in names if name not in end), end]))
    return "  ->  ".join(texts[-_SHOWN_TURNS:])


def turns_to_show(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return the messages of a conversation for a terminal, with `image_text` in place of each image."""
    turns = with_texts(trajectory.turns)
    found = placed(turns, logged_images(_with_tokens(trajectory)))
    return [{**turn, "content": text} for turn, (text, _) in zip(turns, found, strict=True)]


def _with_tokens(trajectory: Trajectory) -> Trajectory:
    """Return a conversation with its tokens if it has images, and unchanged otherwise."""
    has_images = trajectory.row_inputs is not None and trajectory.row_inputs.images is not None
    return whole([trajectory])[0] if has_images and trajectory.stored is not None else trajectory


class TrajectoryLog:
    """Write trajectories below the run's log folder.

    Args:
        enabled: `logger.save_trajectories`.
        shown: Object that shows answers on a terminal. If None, no answers are shown.
    """

    def __init__(self, folder: Path, enabled: bool, shown: ShownAnswers | None = None):
        self._shown = shown
        self._folder = folder
        self._enabled = enabled
        self._output = OptionalOutput(f"Conversations in {folder}")
        self._images = ImageLog(folder)

    def write_training(self, step: int, trajectories: Sequence[Trajectory], batch: BatchedDataDict[Any]) -> None:
        """Write the samples of a training step. `batch` has one row for each conversation (`rows.rows_of`)."""
        if self._shown is not None:
            self._shown.show(step, trajectories)
        if not self._enabled:
            return
        self._write(f"train_data_step{step}.jsonl", self._lines(rows_of(trajectories), batch))

    def write_validation(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Write the samples of a validation."""
        if self._enabled:
            lines = (_describe(row) | self._images_of(row) for row in rows_of(trajectories))
            self._write(f"val_data_step{step}.jsonl", lines)

    def _write(self, name: str, lines: Iterable[dict[str, Any]]) -> None:
        with self._output.attempt():
            texts = (json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            write_atomically(self._folder / name, texts)

    def _lines(self, trajectories: Sequence[Trajectory], batch: BatchedDataDict[Any]) -> Iterator[dict[str, Any]]:
        """Yield the lines of a step. Tokens stored in other processes are fetched for a few rows at a time."""
        for start in range(0, len(trajectories), _ROWS_AT_ONCE):
            rows = BatchRows.of(batch.slice(start, start + _ROWS_AT_ONCE)).whole()
            for row, trajectory in enumerate(trajectories[start : start + _ROWS_AT_ONCE]):
                yield _describe(trajectory) | _tokens_of(rows, row) | self._images_of(trajectory)

    def _images_of(self, row: Trajectory) -> dict[str, Any]:
        """Return the entry for the images of a line, or nothing if it has none, and write their pictures."""
        images = self._images.write(_with_tokens(row))
        return {"images": images} if images else {}


def _describe(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "idx": trajectory.idx,
        "group": trajectory.group_index,
        "sample": trajectory.sample_index,
        **({} if trajectory.branch is None else {"branch": trajectory.branch}),
        "task_name": trajectory.task_name,
        "content": with_texts(messages_of(trajectory)),
        "rewards": trajectory.reward,
        "turn_rewards": trajectory.turn_rewards,
        "step_rewards": trajectory.step_rewards,
        "reward_components": trajectory.reward_components,
        "penalized_reward": trajectory.penalized_reward,
        "penalties": trajectory.penalties,
        "malformed_thinking": trajectory.malformed_thinking,
        "num_thinking_tokens": trajectory.num_thinking_tokens,
        "effort": trajectory.effort,
        "outcome": str(trajectory.outcome),
        "ended_by": str(trajectory.ended_by),
        "error": trajectory.error,
        "answer": trajectory.answer,
        "weight_versions": trajectory.weight_versions,
        "response_length": trajectory.response_length,
    }


def _tokens_of(batch: BatchedDataDict[Any], row: int) -> dict[str, Any]:
    length = int(batch["input_lengths"][row])
    values: dict[str, Any] = {
        "input_lengths": length,
        "token_ids": batch["input_ids"][row, :length].tolist(),
        "token_loss_mask": batch["token_mask"][row, :length].int().tolist(),
        "sample_loss_mask": float(batch["sample_mask"][row]),
    }
    for name in _PER_TOKEN:
        if name in batch:
            numbers = batch[name][row, :length].tolist()
            values[name] = [round(number, _DECIMALS) for number in numbers]
    return values
