"""Groups that are played alone: the same samples as in a collection, with their own deadline, closings and failures."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rollout_parts import LetterTokenizer, ScriptedEngine, ScriptedEnvironment, graded, prompts

from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.rollouts import RolloutKey, RolloutLimits, RolloutRunner
from nemo_rl.experience.trajectory import Rollouts, Trajectory
from nemo_rl.models.generation.interfaces import GenerationRequest, SamplingParams
from nemo_rl.utils.errors import ConfigError, DeadlineExceededError, GenerationError

pytestmark = pytest.mark.fast

SAMPLING = SamplingParams(max_new_tokens=8, stop_token_ids=(0,))
KEY = RolloutKey(run_seed=1, phase="train", step=3, round=1, first_group=10)


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    thread = EventLoopThread()
    yield thread
    thread.close()


def make_runner(loop: EventLoopThread, engine: Any = None, environment: Any = None, **limits: Any) -> RolloutRunner:
    bounds = {"max_sequence_length": 64, "max_turns": 1, "timeout_s": 20.0} | limits
    engine = engine or ScriptedEngine(lambda r: [ord("a") + r.seed % 7, 0])
    environment = environment or ScriptedEnvironment(lambda log, meta: graded(float(ord(log[-1]["content"][0]))))
    return RolloutRunner(engine, {"game": environment}, LetterTokenizer(), RolloutLimits(**bounds), loop)  # type: ignore[arg-type]


def told(sample: Trajectory) -> Any:
    """What training sees of a sample."""
    return sample.group_index, sample.sample_index, sample.idx, sample.response_text, sample.reward


def finished(runner: RolloutRunner, batch: Any, rows: list[int], num_generations: int = 2) -> list[Rollouts]:
    """Groups that were started in the order of `rows`."""
    tasks = [runner.start_group(batch, row, num_generations, SAMPLING, KEY) for row in rows]
    return [task.result(20) for task in tasks]


def test_a_group_has_the_same_samples_alone_and_in_a_collection(loop: EventLoopThread) -> None:
    batch = prompts("one", "two", "three", stop_strings=[["x"], None, ["y"]])
    together = make_runner(loop).collect(batch, 4, SAMPLING, KEY).trajectories
    alone = finished(make_runner(loop), batch, [2, 0, 1], 4)
    assert [told(t) for t in together] == [told(t) for row in (1, 2, 0) for t in alone[row].trajectories]
    assert len({t.response_text for t in together}) > 2


class Slow(ScriptedEngine):
    """Does not answer the prompt "slow"."""

    async def generate(self, request: GenerationRequest) -> Any:
        if request.prompt_token_ids == [ord(letter) for letter in "slow"]:
            await asyncio.sleep(60)
        return await super().generate(request)

    def describe_open(self) -> str:
        return "engine 3 has 2 requests open"


def test_a_group_has_its_own_deadline(loop: EventLoopThread) -> None:
    environment = ScriptedEnvironment(lambda log, meta: graded(1.0))
    runner = make_runner(loop, Slow(lambda r: [97, 0]), environment, timeout_s=0.3)
    batch = prompts("slow", "fast")
    late, soon = (runner.start_group(batch, row, 2, SAMPLING, KEY) for row in (0, 1))
    assert len(soon.result(10).trajectories) == 2
    message = r"prompt 10 of train step 3 did not finish within 0\.3 s \(cluster.timeouts.rollout_s\)\.\nengine 3 has 2"
    with pytest.raises(DeadlineExceededError, match=message) as error:
        late.result(10)
    assert error.value.__notes__ == ["Raised by the sampling of prompt 10 of train step 3."]
    assert len(environment.closed) == 4, "episodes of the group that was too slow are closed too"


def test_a_collection_does_not_wait_for_the_episodes_of_groups_that_run_beside_it(loop: EventLoopThread) -> None:
    may_close = threading.Event()
    environment = ScriptedEnvironment(lambda log, meta: graded(1.0))

    async def close(metadata: Any) -> None:
        while metadata["ground_truth"] == "train" and not may_close.is_set():
            await asyncio.sleep(0.01)
        environment.closed.append(metadata)

    environment.close_episode = close  # type: ignore[method-assign]
    runner = make_runner(loop, environment=environment)
    training = runner.start_group(prompts("train"), 0, 2, SAMPLING, KEY)
    while environment.num_steps < 2:
        time.sleep(0.01)
    assert len(runner.collect(prompts("validate"), 2, SAMPLING, KEY).trajectories) == 2
    assert not training.is_done
    may_close.set()
    training.result(10)
    assert len(environment.closed) == 4


class Halving(ScriptedEnvironment):
    """Halves rewards when samples are finished."""

    def __init__(self, post_processes_groups: bool):
        super().__init__(lambda log, meta: graded(1.0))
        self.post_processes_groups = post_processes_groups

    async def global_post_process_and_metrics(self, batch: Any) -> Any:
        self.batches.append(batch)
        batch["rewards"] = batch["rewards"] / 2
        return batch, {"seen": len(batch["rewards"])}


@pytest.mark.parametrize(("by_group", "sizes"), [(True, [2, 2, 2]), (False, [6])])
def test_a_collection_is_post_processed_in_the_units_that_the_environment_declares(
    loop: EventLoopThread, by_group: bool, sizes: list[int]
) -> None:
    environment = Halving(by_group)
    collection = make_runner(loop, environment=environment).stream(prompts("a", "b", "c"), 2, SAMPLING, KEY)
    at_hand_over = [sample.reward for group in collection for sample in group]
    assert [len(batch["rewards"]) for batch in environment.batches] == sizes
    assert collection.metrics == {"game/seen": sizes[0]}
    if by_group:
        assert at_hand_over == [0.5] * 6


@pytest.mark.parametrize("by_group", [True, False])
def test_lone_groups_are_completed_together(loop: EventLoopThread, by_group: bool) -> None:
    environment = Halving(by_group)
    runner = make_runner(loop, environment=environment)
    groups = finished(runner, prompts("a", "b"), [0, 1])
    samples = [sample for group in groups for sample in group.trajectories]
    assert [sample.reward for sample in samples] == [0.5 if by_group else 1.0] * 4
    assert runner.post_process(groups) == {"game/seen": 2 if by_group else 4}
    assert [sample.reward for sample in samples] == [0.5] * 4


def test_waiting_for_groups_leaves_their_failures_to_whoever_asks_for_them(loop: EventLoopThread) -> None:
    def script(request: GenerationRequest) -> list[int]:
        raise GenerationError("the engine is broken")

    runner = make_runner(loop, ScriptedEngine(script))
    runner.wait_for_groups()
    task = runner.start_group(prompts("a"), 0, 2, SAMPLING, KEY)
    runner.wait_for_groups()
    assert task.is_done
    with pytest.raises(GenerationError, match="the engine is broken"):
        task.result(1)


def test_the_failure_of_a_group_ends_the_next_wait_for_rollouts(loop: EventLoopThread) -> None:
    def script(request: GenerationRequest) -> list[int]:
        if request.prompt_token_ids == [ord("b")]:
            raise GenerationError("the engine is broken")
        return [0]

    runner = make_runner(loop, ScriptedEngine(script), ScriptedEnvironment(lambda log, meta: graded(1.0)))
    runner.start_group(prompts("b"), 0, 2, SAMPLING, KEY)
    runner.wait_for_groups()
    with pytest.raises(GenerationError, match="the engine is broken") as error:
        runner.collect(prompts("a"), 2, SAMPLING, KEY)
    assert error.value.__notes__ == [
        "Raised by the sampling of prompt 10 of train step 3, which ran in the background."
    ]


def test_a_group_of_an_unknown_environment_is_refused_before_it_starts(loop: EventLoopThread) -> None:
    runner = make_runner(loop)
    with pytest.raises(ConfigError, match=r"environment 'chess'; running are \['game'\]"):
        runner.start_group(prompts("a", "b", task_name=["game", "chess"]), 1, 2, SAMPLING, KEY)
    assert len(finished(runner, prompts("a", "b", task_name=["game", "chess"]), [0])) == 1


def test_an_environment_class_declares_whether_groups_are_enough() -> None:
    from nemo_rl.environments.workers.loading import traits_of

    class Plain(EnvironmentInterface[Any]):
        def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn[Any]:
            raise NotImplementedError

    class ByGroup(Plain):
        post_processes_groups = True

    assert [traits_of(each, {}).post_processes_groups for each in (Plain, ByGroup)] == [False, True]
