"""Find problems of a run in its curves, and describe them in plain sentences.

Each rule reads the curves and returns one finding or none. Invariant: each threshold is written once, in its rule, and
the text of the finding contains it.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, pstdev
from typing import Any, Literal

from nemo_rl.commands.report.curves import Curves

_METRICS = "docs/algorithms/grpo.md, section Metrics"
_FEW = 5
"""Number of steps at the start of a run with which later steps are compared."""


@dataclass(frozen=True)
class RunFinding:
    """One observation about a run."""

    level: Literal["problem", "warning", "note"]
    """Importance. "problem": results are wrong or training is disturbed; "warning": they may be; "note": all others."""
    title: str
    """Summary of the observation in a few words."""
    text: str
    """Figures, the threshold, and advice."""
    metric: str
    """Name of the curve that shows the observation."""
    steps: tuple[int, int]
    """First and last step of the observation."""
    guide: str = _METRICS
    """Page of the documentation about the observation."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


type Points = Sequence[tuple[int, float]]
type Rule = Callable[[Curves], RunFinding | None]


def find(curves: Curves, algorithm: str = "") -> list[RunFinding]:
    """Return the findings of a run, problems first.

    Args:
        curves: metrics of the run.
        algorithm: name of its algorithm's section; rules about rewards are left out for distillation.
    """
    rules = [rule for rule in RULES if algorithm not in _WITHOUT_REWARDS or rule not in _ABOUT_REWARDS]
    found = [finding for rule in rules if (finding := rule(curves)) is not None]
    return sorted(found, key=lambda finding: ("problem", "warning", "note").index(finding.level))


def _bounds(points: Points) -> tuple[int, int]:
    return points[0][0], points[-1][0]


def _sum(points: Points) -> float:
    return sum(value for _, value in points)


def _most(points: Points) -> float:
    return max(value for _, value in points)


def _above(curves: Curves, name: str, threshold: float) -> Points:
    return [point for point in curves.get(name).known if point[1] > threshold]


def not_finite(curves: Curves) -> RunFinding | None:
    """Find numbers of an update that are not finite."""
    for name in ("train/loss", "train/grad_norm", "train/token_mult_prob_error", "train/critic/loss"):
        curve = curves.get(name)
        steps = [step for step, value in zip(curve.steps, curve.values, strict=True) if value is None]
        if steps:
            return RunFinding(
                "problem",
                "A number is not finite",
                f"{name} is infinite or no number in {len(steps)} steps. Lower the learning rate; look at the first of "
                "these steps.",
                name,
                (steps[0], steps[-1]),
            )
    return None


def engine_mismatch(curves: Curves) -> RunFinding | None:
    """Find different probabilities of sampled tokens in trainer and engine."""
    name, most = "train/token_mult_prob_error", 1.05
    ages = dict(curves.get("train/max_trajectory_age").known)
    over = [point for point in _above(curves, name, most) if not ages.get(point[0])]
    if not over:
        return None
    return RunFinding(
        "problem",
        "Trainer and engine disagree",
        f"token_mult_prob_error is above {most} in {len(over)} steps with answers of the current weights, at most "
        f"{_most(over):.4g}; 1 is perfect. Look for another number format, a changed chat template, or weights that an "
        "engine did not get.",
        name,
        _bounds(over),
        "docs/start/faq.md",
    )


def entropy_collapse(curves: Curves) -> RunFinding | None:
    """Find a policy that stops exploring."""
    name, share, least = "train/approx_entropy", 0.1, 0.02
    points = curves.get(name).known
    if len(points) < 2 * _FEW:
        return None
    start, end = fmean(v for _, v in points[:_FEW]), fmean(v for _, v in points[-_FEW:])
    if end > max(share * start, least) or end > start / 2:
        return None
    low = [point for point in points if point[1] <= max(share * start, least)]
    return RunFinding(
        "warning",
        "The entropy has collapsed",
        f"approx_entropy fell from {start:.3g} to {end:.3g} nats a token, below a tenth of its start or {least}. "
        "The policy hardly explores any more. Lower the learning rate, raise ratio_clip_max, or add a KL term.",
        name,
        _bounds(low),
    )


def kl_spike(curves: Curves) -> RunFinding | None:
    """Find jumps of the distance to the reference."""
    name, times, least = "train/kl_penalty", 10.0, 0.1
    points = [point for point in curves.get(name).known if point[1] != 0]
    if len(points) < 2 * _FEW:
        return None
    usual = median(value for _, value in points)
    spikes = [point for point in points if point[1] > max(times * usual, least)]
    if not spikes:
        return None
    return RunFinding(
        "warning",
        "The KL divergence spikes",
        f"kl_penalty is more than {times:g} times its median of {usual:.3g}, and more than {least}, in {len(spikes)} "
        f"steps, at most {_most(spikes):.3g}. Lower the learning rate or the gradient's bound.",
        name,
        _bounds(spikes),
    )


def gradient_spike(curves: Curves) -> RunFinding | None:
    """Find jumps of the gradient."""
    name, times = "train/grad_norm", 20.0
    points = curves.get(name).known
    if len(points) < 2 * _FEW:
        return None
    points = points[_FEW:]  # the first steps of a new head have large gradients
    usual = median(value for _, value in points)
    spikes = [point for point in points if usual > 0 and point[1] > times * usual]
    if not spikes:
        return None
    return RunFinding(
        "warning",
        "The gradient norm spikes",
        f"grad_norm is more than {times:g} times its median of {usual:.3g} in {len(spikes)} steps, at most "
        f"{_most(spikes):.3g}.",
        name,
        _bounds(spikes),
    )


def skipped_updates(curves: Curves) -> RunFinding | None:
    """Find updates that were dropped."""
    for name, whose in (("train/skipped_updates", ""), ("train/critic/skipped_updates", " of the critic")):
        over = _above(curves, name, 0)
        if over:
            return RunFinding(
                "problem",
                "Updates were skipped",
                f"{_sum(over):g} updates{whose} in {len(over)} steps had a gradient that is not finite, or no token "
                "that counts.",
                name,
                _bounds(over),
            )
    return None


def useless_critic(curves: Curves) -> RunFinding | None:
    """Find a critic that does not learn to predict returns."""
    name, least = "train/critic/explained_var", 0.1
    points = curves.get(name).known
    if len(points) < 2 * _FEW or _most(points) >= least:
        return None
    return RunFinding(
        "warning",
        "The critic predicts nothing",
        f"explained_var is below {least} in all {len(points)} steps, at most {_most(points):.3g}; 1 is perfect, and 0 "
        "is no better than a constant. Raise value.optimizer.kwargs.lr, or train the critic alone at first with "
        "ppo.policy_training_start_step.",
        name,
        _bounds(points),
        "docs/algorithms/ppo.md, section Metrics",
    )


def truncation(curves: Curves) -> RunFinding | None:
    """Find answers that are cut off."""
    name, most = "train/truncation_rate", 0.2
    over = _above(curves, name, most)
    num_steps = len(curves.get(name).known)
    if len(over) < max(2, num_steps / 10):
        return None
    return RunFinding(
        "warning",
        "Many answers are cut off",
        f"More than {most:.0%} of the answers reach a length limit in {len(over)} of {num_steps} steps, at most "
        f"{_most(over):.0%}. Raise policy.generation.max_new_tokens or the sequence length, or "
        "shape the reward by length.",
        name,
        _bounds(over),
    )


def reward_errors(curves: Curves) -> RunFinding | None:
    """Find samples that could not be graded."""
    name, few = "train/num_reward_errors", 0.01
    over = _above(curves, name, 0)
    if not over:
        return None
    number, total = _sum(over), _sum(curves.get("train/num_samples").known)
    return RunFinding(
        "warning" if number < few * total else "problem",
        "Samples could not be graded",
        f"{number:g} samples in {len(over)} steps have an error in place of a reward. Filter "
        "the rollouts by the outcome reward_error to see why.",
        name,
        _bounds(over),
    )


def nothing_to_learn(curves: Curves) -> RunFinding | None:
    """Find steps in which all rewards are equal."""
    low, high = curves.get("train/min_total_reward").known, dict(curves.get("train/max_total_reward").known)
    equal = [(step, value) for step, value in low if high.get(step) == value]
    if not low or len(equal) < max(2, len(low) // 10):
        return None
    return RunFinding(
        "warning",
        "Steps without a difference of rewards",
        f"In {len(equal)} of {len(low)} steps all samples have the same reward, so there is nothing to learn. Choose "
        "problems that are neither too easy nor too hard, or use dynamic sampling.",
        "train/reward",
        _bounds(equal),
    )


def no_progress(curves: Curves) -> RunFinding | None:
    """Find a reward that does not rise."""
    name, enough = "train/reward", 20
    points = curves.get(name).known
    if len(points) < enough:
        return None
    quarter = len(points) // 4
    start, end = ([value for _, value in part] for part in (points[:quarter], points[-quarter:]))
    if fmean(end) > fmean(start) + 0.5 * pstdev(start):
        return None
    return RunFinding(
        "note",
        "The reward does not rise",
        f"The mean reward is {fmean(start):.3g} in the first quarter of the steps and {fmean(end):.3g} in the last, "
        "which is not more than half a standard deviation above it.",
        name,
        _bounds(points),
    )


def preemptions(curves: Curves) -> RunFinding | None:
    """Find engines that run out of memory for keys and values."""
    name = "generation/num_preemptions"
    over = _above(curves, name, 0)
    if not over:
        return None
    return RunFinding(
        "note",
        "Engines interrupt requests for lack of memory",
        f"{_sum(over):g} requests in {len(over)} steps were computed again, because the "
        "key-value cache was full. Give engines more memory, or fewer requests at a time.",
        name,
        _bounds(over),
        "docs/algorithms/overlap.md",
    )


def idle_shares(curves: Curves) -> RunFinding | None:
    """Find a trainer or engines that wait most of the time, if a setting can change that.

    If they share devices, one has to wait for the other, and only time in which both wait can be saved.
    """
    most, most_of_both = 0.6, 0.2
    points = {part: curves.get(f"idle/{part}").known[1:] for part in ("trainer", "engines")}
    means = {part: fmean(value for _, value in known) for part, known in points.items() if known}
    part = max(means, key=lambda name: means[name], default="")
    if not part or means[part] <= most:
        return None
    both = sum(means.values()) - 1.0
    if curves.run.shares_devices and both <= most_of_both:
        return None
    advice = f"Neither the trainer nor the engines had any for {both:.0%} of it. " if both > most_of_both else ""
    return RunFinding(
        "note",
        f"The {part} {'is' if part == 'trainer' else 'are'} idle for most of the time",
        f"The {part} had no work for {means[part]:.0%} of the time (more than {most:.0%}). {advice}"
        "Overlap of sampling and training may help.",
        f"idle/{part}",
        _bounds(points[part]),
        "docs/algorithms/overlap.md",
    )


RULES: tuple[Rule, ...] = (
    not_finite,
    engine_mismatch,
    skipped_updates,
    reward_errors,
    entropy_collapse,
    kl_spike,
    gradient_spike,
    useless_critic,
    truncation,
    nothing_to_learn,
    no_progress,
    preemptions,
    idle_shares,
)

_WITHOUT_REWARDS = ("distillation",)
_ABOUT_REWARDS = (nothing_to_learn, no_progress)
