"""The reward of each turn of a sample, and where its tokens are."""

import asyncio

import pytest
import torch

from nemo_rl.environments.interfaces import StepResult
from nemo_rl.experience.post_processing import post_process
from nemo_rl.experience.samples import _absorb
from nemo_rl.experience.trajectory import Trajectory

pytestmark = pytest.mark.fast


def message(role: str, length: int) -> dict:
    ids = torch.zeros(length, dtype=torch.int64)
    written = {"generation_logprobs": torch.zeros(length)} if role == "assistant" else {}
    return {"role": role, "content": "", "token_ids": ids, **written}


def two_turns() -> Trajectory:
    log = [message("user", 3), message("assistant", 2), message("environment", 4), message("assistant", 1)]
    return Trajectory(0, 0, 0, "game", log, 3)


class Correcting:
    """An environment that changes every reward by the same amount."""

    def __init__(self, change: float):
        self.change = change

    async def global_post_process_and_metrics(self, batch):
        batch["rewards"] = batch["rewards"] + self.change
        return batch, {}


def played(*rewards: float | dict[str, float]) -> Trajectory:
    sample = two_turns()
    for reward in rewards:
        assert _absorb(sample, StepResult({}, None, reward, terminated=False))
    return sample


def test_turn_rewards_add_up_to_the_reward():
    sample = played(1.0, 0.25)
    assert (sample.turn_rewards, sample.reward) == ([1.0, 0.25], 1.25)


def test_a_turn_with_components_has_their_sum():
    sample = played({"right": 1.0, "short": 0.5}, {"right": 0.0, "short": 0.25})
    assert sample.turn_rewards == [1.5, 0.25]
    assert sample.reward_components == {"right": 1.0, "short": 0.75}


def test_spans_are_the_tokens_that_the_policy_wrote():
    assert two_turns().turn_spans == [(3, 5), (9, 10)]


def test_a_correction_of_the_total_goes_to_the_last_turn():
    sample = played(1.0, 0.25)
    asyncio.run(post_process({"game": Correcting(-0.5)}, [sample]))
    assert (sample.turn_rewards, sample.reward) == ([1.0, -0.25], 0.75)


def test_an_environment_that_corrects_nothing_leaves_turn_rewards_as_they_are():
    sample = played(1.0, 0.25)
    asyncio.run(post_process({"game": Correcting(0.0)}, [sample]))
    assert (sample.turn_rewards, sample.reward) == ([1.0, 0.25], 1.25)
