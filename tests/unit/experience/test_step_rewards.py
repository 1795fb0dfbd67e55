"""Rewards of the steps of an answer: from positions in its text to tokens of the sample."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_parts import ScriptedEngine, ScriptedEnvironment, graded, prompts
from transformers import AutoTokenizer

from nemo_rl.data.messages.steps import ends_of_step_texts, num_tokens_until, split_steps
from nemo_rl.environments.interfaces import EnvironmentReturn, split_return
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.progress import SampleProgress
from nemo_rl.experience.rollouts import RolloutKey, RolloutLimits, RolloutRunner
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.models.generation.interfaces import ResponseSoFar, SamplingParams

pytestmark = pytest.mark.fast

QWEN3 = Path(__file__).resolve().parents[2] / "assets/tokenizers/qwen3"
ANSWER = "7+5=12\n\n30+80=110 – gut 👍🏽\n日本: 12+110=122\n"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(QWEN3)


@pytest.mark.parametrize("answer", [ANSWER, "\n\na\nb", "a\n", "a", " \n \na\n \n", "a\nb\n \n", "", "\n"])
def test_ends_divide_an_answer_into_its_steps(answer: str) -> None:
    ends = ends_of_step_texts(answer, "\n")
    parts = [answer[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert [part.strip() for part in parts] == [step.strip() for step in split_steps(answer, "\n")]
    assert not ends or ends[-1] == len(answer)


def test_tokens_up_to_a_position_are_the_fewest_whose_text_has_it(tokenizer: Any) -> None:
    """The reference decodes every prefix. A character of several tokens is complete with its last one."""
    ids = [*tokenizer(ANSWER)["input_ids"], tokenizer.eos_token_id]
    texts = [tokenizer.decode(ids[:count], skip_special_tokens=True) for count in range(len(ids) + 1)]
    whole = [len(text) if ANSWER.startswith(text) else 0 for text in texts]
    assert 0 in whole[1:], "the text has a character of several tokens"
    ends = list(range(1, len(ANSWER) + 1))
    want = [next(count for count, length in enumerate(whole) if length >= end) for end in ends]
    assert num_tokens_until(ends, ids, tokenizer) == want


def test_a_cut_character_does_not_lose_the_last_step(tokenizer: Any) -> None:
    ids = tokenizer("a\n日本👍🏽")["input_ids"][:-1]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert num_tokens_until(ends_of_step_texts(text, "\n"), ids, tokenizer)[-1] == len(ids)


def rewarded(steps: Any, reward: float = 1.0) -> EnvironmentReturn[Any]:
    return EnvironmentReturn(
        observations=[{"role": "environment", "content": ""}],
        metadata=[None],
        next_stop_strings=[None],
        rewards=torch.tensor([reward]),
        terminateds=torch.ones(1, dtype=torch.bool),
        step_rewards=steps,
    )


def test_an_environment_gives_rewards_of_steps_or_none() -> None:
    (result,) = split_return(rewarded([[(2, 0.5), (7, torch.tensor(0.25))]]), 1, "own")
    assert result.step_rewards == [(2, 0.5), (7, 0.25)]
    assert [split_return(rewarded(none), 1, "own")[0].step_rewards for none in (None, [None])] == [[], []]


@pytest.mark.parametrize("steps", [[(2, 0.5), (2, 0.5)], [(0, 0.5)], [(3, 0.5), (2, 0.5)], [(2, float("nan"))]])
def test_steps_without_an_order_or_a_number_are_refused(steps: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="ends must increase and rewards be finite"):
        split_return(rewarded([steps]), 1, "own")


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    thread = EventLoopThread()
    yield thread
    thread.close()


def test_a_sample_has_its_steps_in_tokens_also_from_a_checkpoint(loop: EventLoopThread, tokenizer: Any) -> None:
    ids = [*tokenizer(ANSWER)["input_ids"], tokenizer.eos_token_id]
    ends = ends_of_step_texts(ANSWER, "\n")
    steps = list(zip(ends, (0.5, 0.25, 0.125), strict=True))
    environment = ScriptedEnvironment(lambda log, meta: graded(0.875, step_rewards=steps))
    limits = RolloutLimits(max_sequence_length=200, max_turns=1, timeout_s=60.0)
    runner = RolloutRunner(ScriptedEngine(lambda request: ids), {"game": environment}, tokenizer, limits, loop)
    key = RolloutKey(run_seed=1, phase="train", step=3)
    (sample,) = runner.collect(prompts("a"), 1, SamplingParams(max_new_tokens=100), key).trajectories
    spans = sample.rewarded_spans
    assert [reward for _, reward in spans] == [0.5, 0.25, 0.125]
    texts = [tokenizer.decode(ids[start - 1 : end - 1], skip_special_tokens=True) for (start, end), _ in spans]
    assert [text.strip() for text in texts] == split_steps(ANSWER, "\n")
    assert spans[-1][0][1] == sample.length
    assert Trajectory.from_state(sample.state_dict()).rewarded_spans == spans
    stored = SampleProgress(sample).state_dict(ResponseSoFar.nothing())
    assert SampleProgress.from_state(stored, sample).sample.rewarded_spans == spans
