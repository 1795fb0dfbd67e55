r"""Reward answers about images with the functions that the environment `vlm` names.

    response, known answer ─► each reward ─► ImageScore ─► mathematics, in a grading process ─► weighted sum

An answer is the text between the first opening tag and the last closing tag. Invariant: an answer that cannot be read
has the value 0. A known answer that cannot be read, and an answer that cannot be compared, are errors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from nemo_rl.config.schema.env import ImageRewardConfig
from nemo_rl.environments.grading.final_answer import find_boxes, last_boxed
from nemo_rl.environments.grading.grade import Grade, VerifierResult
from nemo_rl.environments.grading.pool import GradingPool
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.named_parts import fitting_arguments

_RIGHT_IOU = 0.5
"""Value of a box above which it counts as correct."""
_SMALLEST_UNION = 1e-3
_NUMBER_CHARS = 40
_LARGEST_COORDINATE = 1e9

type Box = tuple[float, float, float, float]
"""Left, top, right and bottom edge."""


@dataclass(frozen=True)
class ImageScore:
    """Value of one reward for one response."""

    value: float
    """The value, without `worth`."""
    correct: bool | None = None
    """Whether the answer is right, or None if the reward says nothing about this."""
    answer: str | None = None
    """Text that was read as the answer, or None if there is none."""
    worth: float | None = None
    """Value to add if `answer` equals the known answer as mathematics, or None if nothing must be compared."""


class ImageReward(Protocol):
    """Interface of a reward. Its fields are the `kwargs` of the configuration."""

    def score(self, response: str, truth: str) -> ImageScore:
        """Return the value of a response.

        Raises:
            ValueError: The known answer cannot be read.
        """

    def written(self, truth: str) -> tuple[str, ...]:
        """Return the lines of a response that gives the known answer in the form that this reward reads."""


def tagged(text: str, tag: str) -> str | None:
    """Return the text between the first `<tag>` and the last `</tag>`, stripped, or None if there is no such pair."""
    start = text.find(f"<{tag}>")
    end = text.rfind(f"</{tag}>", start)
    start += len(f"<{tag}>")
    return text[start:end].strip() if len(f"<{tag}>") <= start <= end else None


@dataclass(frozen=True)
class FormatReward:
    """0.25 for a block of thinking, and 0.75 for a block with an answer."""

    think_tag: str = "think"
    answer_tag: str = "answer"

    def score(self, response: str, truth: str) -> ImageScore:
        """Return the value of the two blocks, whatever the answer is."""
        thinks, answers = (tagged(response, tag) is not None for tag in (self.think_tag, self.answer_tag))
        return ImageScore(0.25 * thinks + 0.75 * answers)

    def written(self, truth: str) -> tuple[str, ...]:
        """Return the two blocks."""
        return f"<{self.think_tag}></{self.think_tag}>", f"<{self.answer_tag}>{truth}</{self.answer_tag}>"


@dataclass(frozen=True)
class ExactAlnumReward:
    """1 if the letters and digits of the answer are those of the known answer, in any case."""

    answer_tag: str = "answer"

    def score(self, response: str, truth: str) -> ImageScore:
        """Compare the letters and digits of the answer."""
        wanted = _letters_and_digits(truth)
        if not wanted:
            raise ValueError(f"the known answer {truth!r:.80} has no letters or digits to compare")
        answer = tagged(response, self.answer_tag)
        right = answer is not None and _letters_and_digits(answer) == wanted
        return ImageScore(float(right), right, answer)

    def written(self, truth: str) -> tuple[str, ...]:
        """Return the block with the answer."""
        return (f"<{self.answer_tag}>{truth}</{self.answer_tag}>",)


@dataclass(frozen=True)
class MathExprReward:
    """1 if the answer equals the known answer as mathematics."""

    tag: str = "answer"

    def score(self, response: str, truth: str) -> ImageScore:
        """Read the answer, which is then compared."""
        answer = tagged(response, self.tag)
        return ImageScore(0.0, False, answer, 1.0 if answer and _is_balanced(answer) else None)

    def written(self, truth: str) -> tuple[str, ...]:
        """Return the block with the answer."""
        return (f"<{self.tag}>{truth}</{self.tag}>",)


@dataclass(frozen=True)
class BoxReward:
    """The generalized intersection over union of two boxes, given as four numbers: x1, y1, x2, y2.

    The penalty for the empty part of the box around both applies only if the intersection over union is below
    `giou_penalty_thres`.
    """

    giou_penalty_thres: float = 10.0
    answer_tag: str = "answer"

    def score(self, response: str, truth: str) -> ImageScore:
        """Compare the boxes."""
        known = _read_box(truth)
        if known is None or not _area(known):
            raise ValueError(f"the known answer {truth!r:.80} is no box x1, y1, x2, y2 with x1 < x2 and y1 < y2")
        answer = tagged(response, self.answer_tag)
        box = None if answer is None else _read_box(answer)
        if box is None:
            return ImageScore(0.0, False, answer)
        value = self._overlap(known, box)
        return ImageScore(value, value > _RIGHT_IOU, answer)

    def written(self, truth: str) -> tuple[str, ...]:
        """Return the block with the answer."""
        return (f"<{self.answer_tag}>{truth}</{self.answer_tag}>",)

    def _overlap(self, known: Box, box: Box) -> float:
        common = _common(known, box)
        union = _area(known) + _area(box) - common
        overlap = common / max(union, _SMALLEST_UNION)
        if overlap >= self.giou_penalty_thres:
            return overlap
        around = _area((min(known[0], box[0]), min(known[1], box[1]), max(known[2], box[2]), max(known[3], box[3])))
        return overlap - (around - union) / around


@dataclass(frozen=True)
class Geo3kReward:
    r"""`format_score` for a box after the thinking, and the rest of 1 if the last box has the known answer."""

    format_score: float = 0.1

    def score(self, response: str, truth: str) -> ImageScore:
        r"""Read the last `\boxed{}`, whose content is then compared."""
        answer = last_boxed(response)
        value = self.format_score * _boxes_after_thinking(response)
        return ImageScore(value, False, answer, 1.0 - self.format_score if answer else None)

    def written(self, truth: str) -> tuple[str, ...]:
        """Return a closed block of thinking and the box."""
        return "</think>", truth if last_boxed(truth) else _boxed(truth)


IMAGE_REWARDS: dict[str, type[ImageReward]] = {
    "format": FormatReward,
    "exact_alnum": ExactAlnumReward,
    "math_expr": MathExprReward,
    "bbox_giou": BoxReward,
    "geo3k": Geo3kReward,
}
"""Rewards by their names in the configuration."""


@dataclass(frozen=True)
class WeightedReward:
    """A reward with its share of the sum of all weights."""

    name: str
    share: float
    reward: ImageReward


def weighted_rewards(functions: Sequence[ImageRewardConfig], place: str) -> list[WeightedReward]:
    """Make the configured rewards.

    Args:
        functions: The list `reward_functions` of a section.
        place: Key of the section, for messages.

    Raises:
        ConfigError: There is no reward, arguments do not fit, or the sum of the weights is not above 0.
    """
    key = f"{place}.reward_functions"
    if not functions:
        raise ConfigError(
            f"{key} is missing or empty. Give a list of rewards, each with name, weight and kwargs. "
            f"Names: {', '.join(IMAGE_REWARDS)}."
        )
    total = math.fsum(function.weight for function in functions)
    if total <= 0:
        raise ConfigError(f"{key}: the sum of the weights is {total:g}. It must be above 0.")
    made = []
    for number, function in enumerate(functions):
        kind = IMAGE_REWARDS[function.name]
        arguments = fitting_arguments(kind, f"{key}.{number}.kwargs", function.kwargs)
        made.append(WeightedReward(function.name, function.weight / total, kind(**arguments)))
    return made


def grade_answers(
    rewards: Sequence[WeightedReward], answers: Sequence[tuple[str, str]], pool: GradingPool
) -> list[Grade]:
    """Grade (response, known answer) pairs, and block until each has an outcome.

    Args:
        pool: Processes that compare mathematics.

    Returns:
        Results with the weighted value of each reward by name (a number if all have one name), or errors.
    """
    scored = [_scored(rewards, response, truth) for response, truth in answers]
    asked = [
        (row, place)
        for row, scores in enumerate(scored)
        if not isinstance(scores, str)
        for place, score in enumerate(scores)
        if score.worth is not None
    ]
    pairs = [(_boxed(str(scored[row][place].answer)), answers[row][1]) for row, place in asked]  # type: ignore[union-attr]
    for (row, place), grade in zip(asked, pool.grade_answers(pairs), strict=True):
        scores = scored[row]
        if isinstance(scores, list):
            scored[row] = _with_judgement(scores, place, grade, rewards[place].name)
    return [Grade(error=each) if isinstance(each, str) else Grade(verified=_summed(rewards, each)) for each in scored]


def known_response(rewards: Sequence[WeightedReward], truth: str) -> str:
    """Return a response with the known answer in each form that the rewards read."""
    return "\n".join(dict.fromkeys(line for weighted in rewards for line in weighted.reward.written(truth)))


def _scored(rewards: Sequence[WeightedReward], response: str, truth: str) -> list[ImageScore] | str:
    """Return the score of each reward, or the reason why a reward has none."""
    scores = []
    for weighted in rewards:
        try:
            scores.append(weighted.reward.score(response, truth))
        except ValueError as error:
            return f"{error}, in the reward {weighted.name!r}"
    return scores


def _with_judgement(scores: list[ImageScore], place: int, grade: Grade, name: str) -> list[ImageScore] | str:
    """Return the scores with the result of a comparison, or the reason why there is no result."""
    if grade.verified is None:
        return f"{grade.error}, in the reward {name!r}"
    score = scores[place]
    right = grade.verified.reward == 1.0
    final = replace(score, value=score.value + (score.worth or 0.0) * right, correct=right)
    return [*scores[:place], final, *scores[place + 1 :]]


def _summed(rewards: Sequence[WeightedReward], scores: Sequence[ImageScore]) -> VerifierResult:
    values: dict[str, float] = {}
    for weighted, score in zip(rewards, scores, strict=True):
        values[weighted.name] = values.get(weighted.name, 0.0) + weighted.share * score.value
    answer = next((score.answer for score in scores if score.answer is not None), None)
    reward = values if len(values) > 1 else math.fsum(values.values())
    return VerifierResult(reward, answer, correct=any(score.correct for score in scores))


def _letters_and_digits(text: str) -> str:
    return "".join(character for character in text if character.isalnum()).lower()


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


def _is_balanced(answer: str) -> bool:
    """Return whether the braces of an answer are balanced, so that a box around it ends after it."""
    boxes = find_boxes(_boxed(answer))
    return bool(boxes) and (boxes[0].start, boxes[0].end) == (0, len(_boxed(answer)))


def _boxes_after_thinking(response: str) -> bool:
    r"""Return whether `</think>` occurs, later `\boxed{`, and later `}`."""
    thinking = response.find("</think>")
    box = response.find("\\boxed{", thinking)
    return 0 <= thinking < box < response.rfind("}")


def _read_box(text: str) -> Box | None:
    """Read four numbers with commas between them, with or without brackets around them."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    parts = text.split(",", 4)
    if len(parts) != 4 or any(len(part) > _NUMBER_CHARS for part in parts):
        return None
    try:
        left, top, right, bottom = map(float, parts)
    except ValueError:
        return None
    ordered = left <= right and top <= bottom
    usable = all(abs(edge) <= _LARGEST_COORDINATE for edge in (left, top, right, bottom))
    return (left, top, right, bottom) if ordered and usable else None


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _common(first: Box, second: Box) -> float:
    """Return the area that two boxes have in common."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    return max(width, 0.0) * max(height, 0.0)
