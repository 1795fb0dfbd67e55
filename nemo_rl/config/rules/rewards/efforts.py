"""Rules on levels of effort."""

import re
from collections.abc import Mapping
from itertools import combinations

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.algorithms.effort_levels import EffortLevelConfig
from nemo_rl.config.schema.algorithms.grpo import GRPOConfig

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_OF_A_BUDGET = ("over_budget_penalty", "over_budget_tokens")


def check_effort_levels(levels: Mapping[str, EffortLevelConfig], grpo: GRPOConfig) -> Findings:
    """Check that levels differ in what the model reads, and that penalties have a budget and an effect."""
    for name, level in levels.items():
        key = f"effort_levels.{name}"
        if not _NAME.fullmatch(name):
            yield f"{key}: a name of a level, which metrics contain, has letters, digits, '_', '.' and '-' only."
        if level.system_prompt is not None and not level.system_prompt.strip():
            yield f"{key}.system_prompt is empty. Give a text, or null."
        changed = [field for field in _OF_A_BUDGET if getattr(level, field) != getattr(EffortLevelConfig(), field)]
        if level.max_thinking_tokens is None and changed:
            yield f"{key}.{changed[0]} has no effect without {key}.max_thinking_tokens. Set it, or remove {changed[0]}."
        if level.max_thinking_tokens is not None and level.over_budget_penalty and grpo.adv_estimator.name == "gdpo":
            yield (
                f"{key}.max_thinking_tokens changes the total reward, but grpo.adv_estimator.name=gdpo computes "
                "advantages from reward components. Set it to null, or use another estimator."
            )
    for (name, level), (other, same) in combinations(levels.items(), 2):
        if (level.system_prompt, level.chat_template_kwargs) == (same.system_prompt, same.chat_template_kwargs):
            yield (
                f"effort_levels.{name} and effort_levels.{other} give the model the same prompt, so it cannot tell "
                "them apart. Give one of them another system_prompt or chat_template_kwargs."
            )
