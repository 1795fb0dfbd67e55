"""Keys of `data.curriculum`: shares of data sets that change with the steps, or with the accuracy of the policy."""

from typing import Annotated, Literal

from pydantic import Field

from nemo_rl.config.base.numbers import AmountOrZero, Count, FactorOrZero, Number
from nemo_rl.config.base.section import Section


class CurriculumPhase(Section):
    """Weights of the data sets from a step on."""

    from_step: AmountOrZero
    """Finished steps after which prompts are drawn with these weights; that of the first phase is 0."""
    weights: dict[str, FactorOrZero]
    """Weight of each data set by its name, as data.train.weight; 0 draws no prompt from it."""


class AccuracyRuleConfig(Section):
    """Draw most from the data sets that the policy solves about as often as the target."""

    target: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of solved samples at which a data set keeps its whole weight; the weight falls linearly to 0 at the
    accuracy that is farthest from the target, 0 or 1."""
    min_share: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Least share of the prompts of each data set whose weight is above 0, also of one that is solved."""
    average_over: Count = 64
    """Groups of a data set that its recent accuracy averages over; older ones count less and less."""
    solved_above: Number = 0.0
    """A sample counts as solved if its reward is above this."""


class CurriculumConfig(Section):
    """Weights of data sets that change during the run."""

    phases: list[CurriculumPhase] = Field(default_factory=list)
    """Weights by step, in place of data.train.weight."""
    interpolation: Literal["none", "linear"] = "none"
    """none: the weights of a phase stay until the next one; linear: they change evenly over its steps into those of the
    next phase, and those of the last phase stay."""
    accuracy: AccuracyRuleConfig | None = None
    """Weights by recent accuracy, multiplied with those of the phases or of data.train.weight; null: no such rule."""
