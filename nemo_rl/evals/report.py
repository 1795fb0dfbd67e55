"""Compute the report of an evaluation: the requested score, further scores, and the text for the console.

It is built from records alone, so a finished evaluation can be reported again. Invariant: every prompt counts in every
score; answers that could not be graded count as wrong, and the report has their number.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Any

from nemo_rl.config.runs.eval import EvalMasterConfig
from nemo_rl.environments.grading.dapo import normalize_answer
from nemo_rl.evals.estimators import consensus_at_k, pass_at_k
from nemo_rl.evals.records import AnswerRecord
from nemo_rl.experience.metrics import mean
from nemo_rl.experience.trajectory import Outcome

WIDTH = 60
PromptScore = Callable[[Sequence[AnswerRecord]], float]


@dataclass(frozen=True)
class Score:
    """A mean over prompts."""

    value: float
    """Mean of the prompts' scores, 0 to 1."""
    standard_error: float
    """Standard error of the mean over prompts; 0 for one prompt."""
    num_prompts: int
    """Prompts in the mean."""


@dataclass(frozen=True)
class EvalReport:
    """Result of an evaluation."""

    model_name: str
    dataset_name: str
    metric: str
    """Name of the metric, for example "pass@1"."""
    num_tests_per_prompt: int
    """Answers per prompt."""
    score: Score
    """The metric's value."""
    sampling: dict[str, Any]
    """Temperature, top_p, top_k, max_new_tokens and seed, and the address of a model at an endpoint."""
    companions: dict[str, Score]
    """Further scores: pass@1 and, with several answers per prompt, pass@k and cons@k for other k."""
    topics: dict[str, Score]
    """The metric by topic, if the data set has topics."""
    answers: dict[str, float]
    """Shares and counts over all answers."""


def make_report(config: EvalMasterConfig, records: Sequence[AnswerRecord]) -> EvalReport:
    """Compute all scores.

    Args:
        config: the configuration of the evaluation.
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
    """Return the mean of the prompts' scores with its standard error; 0 without prompts."""
    if not prompts:
        return Score(0.0, 0.0, 0)
    scores = [score_prompt(answers) for answers in prompts]
    value, count = mean(scores), len(scores)
    variance = sum((score - value) ** 2 for score in scores) / max(count - 1, 1)
    return Score(value, math.sqrt(variance / count), count)


def format_report(report: EvalReport) -> str:
    """Format the report for the end of an evaluation."""
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
