"""An environment that rewards each step of a worked sum, divided by commas."""

from typing import Any

import torch

from nemo_rl.data.messages.steps import ends_of_step_texts, split_steps
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn


class RewardedSteps(EnvironmentInterface[dict]):
    """Rewards a right addition by 0.5, and an answer with the known result by 1 more."""

    def __init__(self, cfg: dict):
        pass

    async def step(self, message_log_batch: list[Any], metadata: list[dict]) -> EnvironmentReturn[dict]:
        texts = [log[-1]["content"] for log in message_log_batch]
        steps = [
            list(zip(ends_of_step_texts(text, ","), map(_reward, split_steps(text, ",")), strict=True))
            for text in texts
        ]
        right = [str(known["ground_truth"]) in text for known, text in zip(metadata, texts, strict=True)]
        totals = [sum(each for _, each in own) + good for own, good in zip(steps, right, strict=True)]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "done"}] * len(texts),
            metadata=list(metadata),
            next_stop_strings=[None] * len(texts),
            rewards=torch.tensor(totals, dtype=torch.float32),
            terminateds=torch.ones(len(texts), dtype=torch.bool),
            step_rewards=steps,
        )


def _reward(step: str) -> float:
    terms, equals, result = step.partition("=")
    numbers = terms.split("+")
    if not equals or not all(number.strip().isdecimal() for number in numbers):
        return 0.0
    return 0.5 * (result.strip() == str(sum(map(int, numbers))))
