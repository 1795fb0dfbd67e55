"""Compute the report of an evaluation: the requested score, further scores, and the text for the console.

The report is computed from records alone, so a finished evaluation can be reported again. Invariant: every prompt
counts in every score. Answers that could not be graded count as wrong, and the report says how many there are.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import batched
from math import comb
from typing import Any

from nemo_rl.config.runs.eval import EvalMasterConfig
from nemo_rl.environments.grading.dapo import normalize_answer
from nemo_rl.evals.records import AnswerRecord
from nemo_rl.experience.metrics import mean
from nemo_rl.experience.trajectory import Outcome


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the probability that at least one of k answers, drawn from n, is right.

    It is the unbiased estimator `1 - C(n - c, k) / C(n, k)` of Chen et al. 2021 (arXiv 2107.03374, equation 1).

    Args:
        num_samples: n, the number of answers to the prompt.
        num_correct: c, the number of right answers.
        k: number of answers that are drawn without replacement.

    Raises:
        ValueError: not 0 <= c <= n, or not 1 <= k <= n.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} right answers in {num_samples}: needs 0 <= c <= n, 1 <= k <= n")
    return float(1 - Fraction(comb(num_samples - num_correct, k), comb(num_samples, k)))


def consensus_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Return the probability that the majority of k answers, drawn from n, is right.

    Equal texts are counted together, and so are answers that are None. Drawn answers keep their order, and the first of
    several texts with equally many votes wins. If answers with the same text were graded differently, the first one
    that is drawn decides.

    The probability is exact. For each answer and each number of votes, the function counts the draws in which this
    answer is the first one with its text, the text gets that many votes, and no other text wins against it
    (`_ways_to_lose`).

    Args:
        answers: the normalized extracted answer of each sample, or None if there is none.
        correct: whether each sample was graded as right.
        k: number of answers that are drawn without replacement.

    Raises:
        ValueError: the lengths differ, or not 1 <= k <= n.

    Example:
        >>> consensus_at_k(["4", "4", "5"], [True, True, False], 3)
        1.0
    """
    n = len(answers)
    if len(correct) != n or not 1 <= k <= n:
        raise ValueError(f"cons@{k} of {n} answers and {len(correct)} grades: needs equal numbers, 1 <= k <= n")
    places: dict[str | None, list[int]] = defaultdict(list)
    for place, answer in enumerate(answers):
        places[answer].append(place)
    wins = 0
    for first in (place for place, grade in enumerate(correct) if grade):
        later = sum(place > first for place in places[answers[first]])
        others = [
            (len(found), sum(place > first for place in found))
            for text, found in places.items()
            if text != answers[first]
        ]
        for votes in range(1, min(later + 1, k) + 1):
            wins += comb(later, votes - 1) * _ways_to_lose(others, votes, k - votes)
    return float(Fraction(wins, comb(n, k)))


def _ways_to_lose(others: Sequence[tuple[int, int]], votes: int, num_drawn: int) -> int:
    """Count the ways to draw `num_drawn` answers from texts that do not win against an answer with `votes` votes."""
    ways = [1] + [0] * num_drawn
    for copies, after in others:
        own = [comb(copies, drawn) for drawn in range(votes)] + [comb(after, votes)]
        ways = [
            sum(own[drawn] * ways[total - drawn] for drawn in range(min(votes, total) + 1))
            for total in range(num_drawn + 1)
        ]
    return ways[num_drawn]


WIDTH = 60
PromptScore = Callable[[Sequence[AnswerRecord]], float]


@dataclass(frozen=True)
class Score:
    """Mean of a score over prompts."""

    value: float
    """Mean of the prompts' scores, from 0 to 1."""
    standard_error: float
    """Standard error of the mean over prompts, which is 0 for one prompt."""
    num_prompts: int
    """Number of prompts in the mean."""


@dataclass(frozen=True)
class EvalReport:
    """Result of an evaluation."""

    model_name: str
    dataset_name: str
    metric: str
    """Name of the metric, for example "pass@1"."""
    num_tests_per_prompt: int
    """Number of answers per prompt."""
    score: Score
    """Value of the metric."""
    sampling: dict[str, Any]
    """Temperature, top_p, top_k, max_new_tokens and seed, and the address of a model at an endpoint."""
    companions: dict[str, Score]
    """Further scores: pass@1 and, with several answers per prompt, pass@k for other k and cons@k."""
    topics: dict[str, Score]
    """Metric by topic, if the data set has topics."""
    answers: dict[str, float]
    """Shares and counts over all answers."""


def make_report(config: EvalMasterConfig, records: Sequence[AnswerRecord]) -> EvalReport:
    """Compute all scores.

    Args:
        records: n answers of each prompt, grouped by prompt.
    """
    wanted, generation = config.eval, config.generation
    n = wanted.num_tests_per_prompt
    prompts = [list(answers) for answers in batched(records, n)]
    score_prompt = prompt_score(wanted.metric, wanted.k_value)
    metric = wanted.metric.replace("@k", f"@{wanted.k_value}")
    by_topic: dict[str, list[list[AnswerRecord]]] = defaultdict(list)
    for answers in prompts:
        if answers[0].topic is not None:
            by_topic[answers[0].topic].append(answers)
    return EvalReport(
        model_name=generation.model_name if generation.endpoint is None else generation.endpoint.model,
        dataset_name=str(config.data.dataset_name or config.data.data_path),
        metric=metric,
        num_tests_per_prompt=n,
        score=average(score_prompt, prompts),
        sampling={
            "max_new_tokens": generation.max_new_tokens,
            "temperature": generation.temperature,
            "top_p": generation.top_p,
            "top_k": generation.top_k,
            "seed": wanted.seed,
            **({} if generation.endpoint is None else {"endpoint": generation.endpoint.base_url}),
        },
        companions={name: average(rule, prompts) for name, rule in _companions(n) if name != metric},
        topics={topic: average(score_prompt, by_topic[topic]) for topic in sorted(by_topic)},
        answers=_answer_statistics(records),
    )


def prompt_score(metric: str, k: int) -> PromptScore:
    """Return the function that scores one prompt under `eval.metric`."""
    if metric == "pass@k":
        return lambda answers: pass_at_k(len(answers), sum(a.is_correct for a in answers), k)
    return lambda answers: consensus_at_k(
        [None if a.answer is None else normalize_answer(a.answer) for a in answers],
        [a.is_correct for a in answers],
        k,
    )


def average(score_prompt: PromptScore, prompts: Sequence[Sequence[AnswerRecord]]) -> Score:
    """Return the mean of the prompts' scores with its standard error. Both are 0 without prompts."""
    if not prompts:
        return Score(0.0, 0.0, 0)
    scores = [score_prompt(answers) for answers in prompts]
    value, count = mean(scores), len(scores)
    variance = sum((score - value) ** 2 for score in scores) / max(count - 1, 1)
    return Score(value, math.sqrt(variance / count), count)


def format_report(report: EvalReport) -> str:
    """Format the report as text for the console."""
    score = report.score
    rows = [(name, f"{other.value:.4f} ± {other.standard_error:.4f}") for name, other in report.companions.items()]
    rows += [(name, f"{value:.4g}") for name, value in report.answers.items()]
    topics = [(name, f"{part.value:.4f} of {part.num_prompts}") for name, part in report.topics.items()]
    return "\n".join(
        [
            "=" * WIDTH,
            f"model_name={report.model_name!r} dataset_name={report.dataset_name!r}",
            " ".join(f"{key}={value}" for key, value in report.sampling.items()),
            "",
            f"metric={report.metric} num_tests_per_prompt={report.num_tests_per_prompt}",
            "",
            f"score={score.value:.4f} ({score.value * score.num_prompts:g}/{score.num_prompts})",
            f"standard_error={score.standard_error:.4f}",
            "",
            *_aligned(rows),
            *(["", f"{report.metric} by topic", *_aligned(topics)] if topics else []),
            "=" * WIDTH,
        ]
    )


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _companions(n: int) -> Iterator[tuple[str, PromptScore]]:
    """Yield pass@k for k = 1, 2, 4 ... and n, and cons@n."""
    for k in dict.fromkeys((*(2**power for power in range(n.bit_length())), n)):
        yield f"pass@{k}", prompt_score("pass@k", k)
    if n > 1:
        yield f"cons@{n}", prompt_score("cons@k", n)


def _answer_statistics(records: Sequence[AnswerRecord]) -> dict[str, float]:
    outcomes = Counter(record.outcome for record in records)
    count = max(len(records), 1)
    lengths = [record.response_length for record in records if record.response_length is not None]
    by_program: Counter[str] = Counter()
    for record in records:
        by_program.update(record.agent_counts)
    return {
        "num_answers": float(len(records)),
        **({"mean_response_length": sum(lengths) / max(len(lengths), 1)} if lengths or not records else {}),
        "truncated_share": outcomes[Outcome.TRUNCATED] / count,
        "without_answer_share": sum(record.answer is None for record in records) / count,
        "num_not_graded": float(outcomes[Outcome.REWARD_ERROR]),
        "num_prompts_too_long": float(sum(r.outcome == Outcome.PROMPT_TOO_LONG and r.sample == 0 for r in records)),
        **{f"agent_{name}": number for name, number in sorted(by_program.items())},
    }
