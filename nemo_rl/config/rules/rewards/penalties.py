"""Rules on penalties on the form of answers."""

import re

from nemo_rl.config.base.part_names import is_own_class
from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.algorithms.reward_penalties import BUILT_IN, RewardPenaltyConfig

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def check_reward_penalties(penalties: RewardPenaltyConfig) -> Findings:
    """Check that penalties have what they look for, and that their names can be told apart."""
    section = "reward_penalties"
    tags = penalties.thinking_tags
    if len(tags) != 2 or not all(tag.strip() for tag in tags) or tags[0] == tags[1]:
        yield (
            f"{section}.thinking_tags={tags} must be two different texts: the one that opens the thinking and the one "
            "that closes it, for example [<think>, </think>]."
        )
    elif tags[0] in tags[1] or tags[1] in tags[0]:
        yield f"{section}.thinking_tags={tags}: one text contains the other, so they cannot be told apart."
    ids = penalties.ids
    if penalties.penalize_unwanted_tokens and not ids.unwanted:
        yield (
            f"{section}.penalize_unwanted_tokens=true needs the tokens: set {section}.token_ids.unwanted to a list of "
            "ids, or the switch to false."
        )
    if ids.think_open is not None and ids.think_open == ids.think_close:
        yield (
            f"{section}.token_ids.think_open and think_close are both {ids.think_open}. Give two tokens, or null for "
            f"those of {section}.thinking_tags."
        )
    for name, part in penalties.own.items():
        if name in BUILT_IN or not _NAME.fullmatch(name):
            yield (
                f"{section}.own.{name}: a name has letters, digits, '_', '.' and '-', and is none of the built-in "
                f"penalties ({', '.join(BUILT_IN)})."
            )
        if not is_own_class(part.name):
            yield (
                f"{section}.own.{name}.name={part.name} is no dotted path of a class. Built-in penalties are switched "
                f"on by {section}.penalize_<name>."
            )
