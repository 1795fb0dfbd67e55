"""Define sections that choose a part by `name`, with `kwargs` for a user's class."""

from typing import Annotated, Any

from pydantic import Field

from nemo_rl.config.base.names import PartName
from nemo_rl.config.base.section import Section


class NamedPartConfig(Section):
    """A part of a run: a built-in part, or a user's class."""

    name: str
    """Built-in name, or the dotted path of a class."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a user's class, which gets no other arguments."""


class SFTLossConfig(NamedPartConfig):
    """The loss."""

    name: Annotated[str, PartName(("nll",))] = "nll"
    """nll: the negative log-likelihood; or the dotted path of a class."""


class DPOLossConfig(NamedPartConfig):
    """The loss."""

    name: Annotated[str, PartName(("dpo",))] = "dpo"
    """dpo: the loss that the section dpo describes; or the dotted path of a class."""


class RMLossConfig(NamedPartConfig):
    """The loss."""

    name: Annotated[str, PartName(("preference",))] = "preference"
    """preference: the negative log-likelihood that the chosen answer is preferred; or the dotted path of a class."""


class RolloutSourceConfig(NamedPartConfig):
    """The source of a step's groups of answers."""

    name: Annotated[str, PartName(("fresh", "dynamic_sampling"))] = "fresh"
    """fresh: answers to the next prompts with the current weights; dynamic_sampling: same as use_dynamic_sampling=true
    of the algorithm; or the dotted path of a class that wraps the source described by the other keys."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a user's class. The source that it wraps is its first argument."""
