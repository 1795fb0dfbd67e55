"""What ends an episode, with the budgets of turns, episodes and sequences; prefix hits; metrics of each environment."""

from collections.abc import Iterator
from typing import Any

import pytest
from rollout_parts import LetterTokenizer, ScriptedEngine, ScriptedEnvironment, graded, prompts

from nemo_rl.environments.interfaces import StepResult
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.metrics import OF_AN_ENVIRONMENT, metrics_by_environment, rollout_metrics
from nemo_rl.experience.rollouts import RolloutKey, RolloutLimits, RolloutRunner
from nemo_rl.experience.trajectory import Ending, Outcome, Trajectory
from nemo_rl.models.generation.interfaces import SamplingParams, ServedBy

pytestmark = pytest.mark.fast

KEY = RolloutKey(run_seed=1, phase="train", step=3)
ANSWER = [ord(c) for c in "abc"] + [0]


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    thread = EventLoopThread()
    yield thread
    thread.close()


def go_on(log: Any, metadata: Any) -> StepResult:
    return graded(0.25, terminated=False, metadata=metadata, observation={"role": "environment", "content": "more"})


def play(loop: EventLoopThread, judge: Any = go_on, *, turn: int = 8, engine: Any = None, **limits: Any) -> Trajectory:
    """Play one sample whose prompt has 2 tokens, whose responses have 4 and whose observations have 4."""
    bounds = {"max_sequence_length": 64, "max_turns": 3, "timeout_s": 20.0} | limits
    environment = ScriptedEnvironment(judge)
    engine = engine or ScriptedEngine(lambda request: ANSWER)
    runner = RolloutRunner(engine, {"game": environment}, LetterTokenizer(), RolloutLimits(**bounds), loop)
    (sample,) = runner.collect(prompts("ab"), 1, SamplingParams(max_new_tokens=turn), KEY).trajectories
    return sample


CASES: dict[Ending, tuple[dict[str, Any], Outcome, int]] = {
    Ending.ENVIRONMENT: ({"judge": lambda log, meta: graded(1.0)}, Outcome.FINISHED, 1),
    Ending.MAX_TURNS: ({}, Outcome.FINISHED, 3),
    Ending.TURN_TOKENS: ({"turn": 3}, Outcome.TRUNCATED, 3),
    Ending.EPISODE_TOKENS: ({"max_episode_tokens": 8}, Outcome.TRUNCATED, 2),
    Ending.SEQUENCE_LENGTH: ({"max_sequence_length": 12}, Outcome.TRUNCATED, 2),
    Ending.FAILURE: ({"judge": lambda log, meta: StepResult.failed("bad move")}, Outcome.REWARD_ERROR, 1),
    Ending.ABORT: ({"judge": lambda log, meta: StepResult.failed("hung", aborted=True)}, Outcome.REWARD_ERROR, 1),
}


@pytest.mark.parametrize("ending", list(Ending))
def test_each_cause_is_named(loop: EventLoopThread, ending: Ending) -> None:
    options, outcome, num_turns = CASES[ending]
    sample = play(loop, **options)
    assert (sample.ended_by, sample.outcome, sample.num_turns) == (ending, outcome, num_turns)
    metrics = rollout_metrics([sample])
    shares = {name: metrics[f"ended_by_{name}"] for name in Ending}
    assert shares == {name: float(name == ending) for name in Ending}


@pytest.mark.parametrize(("budget", "lengths"), [(1, [1]), (4, [4]), (5, [4, 1]), (7, [4, 3]), (12, [4, 4, 4])])
def test_the_episode_budget_cuts_the_last_response(loop: EventLoopThread, budget: int, lengths: list[int]) -> None:
    sample = play(loop, max_episode_tokens=budget)
    assert [end - start for start, end in sample.turn_spans] == lengths
    assert sample.response_length == min(budget, 12)
    assert sample.turn_rewards == [0.25] * len(lengths)  # a response that was cut off is stepped too


def test_a_budget_that_is_used_up_asks_for_no_empty_response(loop: EventLoopThread) -> None:
    engine = ScriptedEngine(lambda request: ANSWER)
    sample = play(loop, engine=engine, max_episode_tokens=4)
    assert len(engine.requests) == 1
    assert sample.message_log[-1]["role"] == "assistant"


def test_a_prompt_that_fills_the_sequence_is_not_played(loop: EventLoopThread) -> None:
    sample = play(loop, max_sequence_length=2)
    assert (sample.outcome, sample.ended_by) == (Outcome.PROMPT_TOO_LONG, Ending.SEQUENCE_LENGTH)
    assert sample.num_turns == 0


class TwoEngines(ScriptedEngine):
    """Serves the turns of a sample from the given engines; remembers where each was sent."""

    def __init__(self, served_by: list[ServedBy]):
        super().__init__(lambda request: ANSWER)
        self.served_by = iter(served_by)
        self.asked_for: list[ServedBy | None] = []

    async def generate(self, request: Any) -> Any:
        self.asked_for.append(request.prefix_at)
        result = await super().generate(request)
        object.__setattr__(result, "served_by", next(self.served_by))
        return result


def test_later_turns_ask_for_the_engine_of_the_prefix(loop: EventLoopThread) -> None:
    first, newer, other = ServedBy(1, 1, 7), ServedBy(1, 1, 8), ServedBy(0, 1, 8)
    engine = TwoEngines([first, first, newer, other])
    sample = play(loop, engine=engine, max_turns=4)
    assert engine.asked_for == [None, first, first, newer]
    assert sample.num_prefix_hits == 1  # keys and values of other weights, or of another engine, are of no use
    assert rollout_metrics([sample])["prefix_hit_rate"] == pytest.approx(1 / 3)


def test_an_ending_survives_a_checkpoint(loop: EventLoopThread) -> None:
    sample = play(loop, max_episode_tokens=5)
    again = Trajectory.from_state(sample.state_dict())
    assert again.ended_by is Ending.EPISODE_TOKENS
    assert again.num_prefix_hits == sample.num_prefix_hits


def test_each_of_several_environments_has_its_metrics(loop: EventLoopThread) -> None:
    good, bad = play(loop), play(loop, lambda log, meta: StepResult.failed("hung", aborted=True))
    bad.task_name = "judge"
    found = metrics_by_environment([good, bad], ["game", "judge", "tool"], OF_AN_ENVIRONMENT)
    assert found["game/reward"] == 0.75
    assert found["game/ended_by_abort"] == 0.0
    assert found["judge/ended_by_abort"] == found["judge/reward_error_rate"] == 1.0
    assert "judge/reward" not in found  # the mean of nothing
    assert found["tool/num_samples"] == 0.0
    assert metrics_by_environment([good], ["game"], OF_AN_ENVIRONMENT) == {}
