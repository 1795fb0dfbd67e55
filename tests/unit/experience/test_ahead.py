"""Sampling ahead of training: every prompt once, no group too old, nothing lost at a resume, a fixed schedule."""

import asyncio
import random
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from rollout_parts import LetterTokenizer, ScriptedEngine, ScriptedEnvironment, graded, prompts

from nemo_rl.algorithms.rollout.ahead import AheadRollouts, GroupFailures, OpenGroup, groups_of_step
from nemo_rl.algorithms.rollout.batches import age
from nemo_rl.algorithms.rollout.source import DynamicSampling, FreshRollouts, Group
from nemo_rl.config import OverlapConfig
from nemo_rl.data.loader import build_loader
from nemo_rl.data.streams.prompt_stream import DataExhausted, PromptPosition, PromptStream
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.rollouts import RolloutLimits, RolloutRunner
from nemo_rl.experience.trajectory import Outcome
from nemo_rl.models.generation.interfaces import GenerationRequest, SamplingParams
from nemo_rl.utils.errors import GenerationError

NUM_PROMPTS, PER_STEP, NUM_STEPS = 48, 4, 12
ORDERS = ("in_order", "ready_first", "weight_fifo", "freshest_first")
SAMPLING = SamplingParams(max_new_tokens=8, stop_token_ids=(0,))


class Uneven(ScriptedEngine):
    """Answers after 0 to 30 ms, as the prompt's letter decides, with the number of that letter."""

    def __init__(self, failing: frozenset[int] = frozenset(), failing_rows: frozenset[int] = frozenset()):
        super().__init__(lambda request: [request.prompt_token_ids[0], 97 + request.seed % 26, 0], weight_version=0)
        self.failing = failing
        self.failing_rows = failing_rows

    async def generate(self, request: GenerationRequest) -> Any:

        await asyncio.sleep((request.prompt_token_ids[0] * 7 % 11) ** 2 / 4000)
        if any(request.prompt_token_ids[0] == prompt_token(row) for row in self.failing_rows):
            raise GenerationError(f"prompt {request.prompt_token_ids[0]} fails")
        if len(self.requests) in self.failing:
            self.requests.append(request)
            raise GenerationError(f"request {len(self.requests)} fails")
        return await super().generate(request)


def prompt_token(row: int) -> int:
    """The token of the prompt of a row."""
    return int(collate([row])["message_log"][0][0]["token_ids"][0])


def collate(rows: list[int]) -> BatchedDataDict[Any]:
    batch = prompts(*(chr(200 + row) for row in rows))
    batch["idx"] = list(rows)
    return batch


def make_stream() -> PromptStream:
    loader = build_loader(range(NUM_PROMPTS), PER_STEP, shuffle=True, seed=3, collate_fn=collate)
    return PromptStream(loader, max_epochs=1)


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    thread = EventLoopThread()
    yield thread
    thread.close()


class Trainer:
    """Takes groups step by step, as a run does: an update of the engines' weights before each step."""

    def __init__(self, loop: EventLoopThread, engine: Uneven | None = None, **keys: Any):
        self.engine = engine or Uneven()
        environment = ScriptedEnvironment(lambda log, meta: graded(float(ord(log[-1]["content"][1]))))
        limits = RolloutLimits(max_sequence_length=64, max_turns=1, timeout_s=20.0)
        self.runner = RolloutRunner(self.engine, {"game": environment}, LetterTokenizer(), limits, loop)  # type: ignore[arg-type]
        self.stream = make_stream()
        fresh = FreshRollouts(self.stream, self.runner, SAMPLING, 2, 5)
        self.source = AheadRollouts(fresh, PER_STEP, OverlapConfig.build(mode="ahead", **keys), NUM_STEPS)
        self.step = 0
        self.trained: list[list[tuple[int, str]]] = []
        self.ages: list[int] = []

    def take(self) -> list[Group]:
        self.step += 1
        self.runner.wait_for_groups()
        self.engine.weight_version = self.step - 1
        return list(self.source.next_groups(self.step))

    def train(self, num_steps: int = NUM_STEPS) -> None:
        while self.step < num_steps:
            groups = self.take()
            samples = [sample for group in groups for sample in group.trajectories]
            self.trained.append([(sample.idx, sample.response_text) for sample in samples])
            self.ages += [age(sample, self.step - 1) for sample in samples]
            self.stream.acknowledge(group.prompt for group in groups if group.prompt is not None)

    def resumed(self, loop: EventLoopThread, **keys: Any) -> "Trainer":
        """A new process that continues from the state of this one."""
        other = Trainer(loop, **keys)
        other.stream.load_state_dict(self.stream.state_dict())
        other.step, other.trained = self.step, list(self.trained)
        return other

    @property
    def rows(self) -> list[int]:
        """The rows that were trained on, once for each group."""
        return sorted(row for step in self.trained for row, _ in step[::2])


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("max_age", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_every_prompt_is_trained_once_and_within_the_age(
    loop: EventLoopThread, order: str, max_age: int, in_flight: bool
) -> None:
    trainer = Trainer(loop, order=order, max_age_steps=max_age, in_flight_weight_updates=in_flight)
    trainer.train()
    assert trainer.rows == list(range(NUM_PROMPTS))
    assert max(trainer.ages) == max_age
    assert {len(step) for step in trainer.trained} == {2 * PER_STEP}
    with pytest.raises(DataExhausted):
        trainer.take()


@pytest.mark.parametrize("order", ORDERS)
def test_no_prompt_is_lost_or_repeated_by_kills(loop: EventLoopThread, order: str) -> None:
    random_ = random.Random(order)
    for _ in range(6):
        keys = {"order": order, "max_age_steps": random_.choice([1, 2, 3]), "in_flight_weight_updates": True}
        trainer = Trainer(loop, **keys)
        for stop in sorted(random_.sample(range(1, NUM_STEPS), 3)):
            trainer.train(stop)
            trainer = trainer.resumed(loop, **keys)
        trainer.train()
        assert trainer.rows == list(range(NUM_PROMPTS))


def test_a_run_in_order_without_updates_in_flight_is_repeated_exactly_also_after_a_kill(loop: EventLoopThread) -> None:
    keys = {"max_age_steps": 2}
    first, second, killed = (Trainer(loop, **keys) for _ in range(3))
    first.train()
    second.train()
    for stop in (1, 2, 7, 11):
        killed.train(stop)
        killed = killed.resumed(loop, **keys)
    killed.train()
    assert first.trained == second.trained == killed.trained
    assert [max(first.ages[8 * step : 8 * step + 8]) for step in range(4)] == [0, 1, 2, 2]


def test_a_straggler_does_not_hold_up_steps_that_can_do_without_it(loop: EventLoopThread) -> None:
    release = threading.Event()

    class OneSlow(Uneven):
        async def generate(self, request: GenerationRequest) -> Any:

            while request.prompt_token_ids[0] == slow and not release.is_set():
                await asyncio.sleep(0.005)
            return await super().generate(request)

    slow = 200 + make_stream().next_batch().rows["idx"][0]
    keys = {"order": "ready_first", "max_age_steps": 3, "in_flight_weight_updates": True}
    trainer = Trainer(loop, OneSlow(), **keys)
    trainer.train(3)
    assert slow - 200 not in trainer.rows
    threading.Timer(0.2, release.set).start()
    trainer.train(4)
    assert slow - 200 in trainer.rows, "its last step takes it, and waits for it"


def test_at_most_the_given_number_of_prompts_is_sampled_at_a_time(loop: EventLoopThread) -> None:
    class Counting(Uneven):
        running = most = 0

        async def generate(self, request: GenerationRequest) -> Any:
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                return await super().generate(request)
            finally:
                self.running -= 1

    engine = Counting()
    trainer = Trainer(loop, engine, max_inflight_prompts=3, max_buffered_groups=5)
    trainer.train()
    assert engine.most == 6, "three groups of two samples"
    assert trainer.rows == list(range(NUM_PROMPTS))


def test_a_failed_group_is_sampled_again_until_too_many_fail_in_a_row(loop: EventLoopThread) -> None:
    patient = Trainer(loop, Uneven(frozenset({2, 30})), max_generation_failures=2)
    patient.train()
    assert patient.rows == list(range(NUM_PROMPTS))
    with pytest.raises(GenerationError, match="fails"):
        Trainer(loop, Uneven(frozenset({2}))).train()


def test_a_prompt_that_fails_each_time_is_skipped_where_the_configuration_allows_it(loop: EventLoopThread) -> None:
    keys = {"max_attempts_per_prompt": 2, "backoff_base_s": 0.01, "max_skipped_prompts": 1, "min_step_fraction": 0.75}
    engine = Uneven(failing_rows=frozenset({7}))
    trainer = Trainer(loop, engine, group_failures=keys)
    skipped: list[Group] = []
    num_skipped = 0.0
    for _ in range(NUM_STEPS):
        groups = trainer.take()
        num_skipped += trainer.source.metrics["num_skipped_prompts"]
        skipped += [group for group in groups if group.trajectories[0].reward is None]
        assert len(groups) == PER_STEP, "the others of the step are trained on"
    assert num_skipped == len(skipped) == 1
    for sample in skipped[0].trajectories:
        assert (sample.idx, sample.outcome, sample.response_length) == (7, Outcome.REWARD_ERROR, 0)
        assert sample.error is not None and "could not be sampled: prompt" in sample.error
    assert trainer.source.state_dict()["num_skipped"] == 1


@pytest.mark.parametrize(
    ("failing", "keys", "message"),
    [
        ({7}, {"max_skipped_prompts": 0}, "fails"),
        ({7, 8}, {"max_skipped_prompts": 1, "min_step_fraction": 0}, "fails"),
        ({7}, {"max_skipped_prompts": 1, "min_step_fraction": 0.9}, "1 of the 4 prompts of a step were skipped"),
    ],
)
def test_too_many_skipped_prompts_end_the_run(
    loop: EventLoopThread, failing: set[int], keys: dict[str, Any], message: str
) -> None:
    failures = {"max_attempts_per_prompt": 2, "backoff_base_s": 0.01, **keys}
    trainer = Trainer(loop, Uneven(failing_rows=frozenset(failing)), group_failures=failures)
    with pytest.raises(GenerationError, match=message):
        trainer.train()


def test_the_pause_before_an_attempt_doubles_up_to_its_limit() -> None:
    keys = {"max_attempts_per_prompt": 6, "backoff_base_s": 1.5, "max_backoff_s": 7}
    failures = GroupFailures(OverlapConfig.build(mode="ahead", group_failures=keys))
    pauses = [failures.pause_before_next(attempt, GenerationError("no engine")) for attempt in range(1, 6)]
    assert pauses == [1.5, 3.0, 6.0, 7.0, 7.0]
    with pytest.raises(GenerationError, match="no engine"):
        failures.pause_before_next(6, GenerationError("no engine"))


def test_dynamic_sampling_takes_its_rounds_from_groups_that_were_sampled_ahead(loop: EventLoopThread) -> None:
    trainer = Trainer(loop, max_age_steps=2)
    source = DynamicSampling(trainer.source, num_groups=PER_STEP, max_rounds=4)
    seen: list[int] = []
    for step in range(1, 4):
        groups = list(source.next_groups(step))
        kept = [group for group in groups if group.trains]
        assert len(kept) == PER_STEP
        assert all(len({sample.reward for sample in group.trajectories}) == 2 for group in kept)
        seen += [group.trajectories[0].idx for group in groups]
    assert len(seen) == len(set(seen))


def open_groups(ends: list[tuple[int, bool]]) -> list[OpenGroup]:
    """Groups with a last step each, which are finished or not."""
    return [
        OpenGroup(number, last, PromptPosition(0, number), SimpleNamespace(is_done=done))  # type: ignore[arg-type]
        for number, (last, done) in enumerate(ends)
    ]


def numbers(groups: list[OpenGroup]) -> set[int]:
    return {group.number for group in groups}


def test_a_step_takes_what_later_steps_have_no_place_for() -> None:
    # Step 5 takes two. Step 6 has two places, but four groups end there.
    groups = open_groups([(6, False), (6, False), (6, False), (6, False), (7, True), (7, True)])
    assert numbers(groups_of_step(groups, 2, 5, "ready_first")) == {0, 1}
    assert numbers(groups_of_step(groups[1:], 2, 5, "ready_first")) == {1, 4}
    assert numbers(groups_of_step(groups[2:], 2, 5, "ready_first")) == {4, 5}


@pytest.mark.parametrize(
    ("order", "chosen"),
    [("in_order", {0, 1}), ("ready_first", {1, 3}), ("weight_fifo", {0, 1}), ("freshest_first", {3, 4})],
)
def test_orders_prefer_different_groups(order: str, chosen: set[int]) -> None:
    groups = open_groups([(6, False), (6, True), (7, False), (7, True), (7, True)])
    assert numbers(groups_of_step(groups, 2, 5, order)) == chosen


@pytest.mark.parametrize("order", ORDERS)
def test_no_group_misses_its_last_step_whatever_finishes_when(order: str) -> None:
    random_ = random.Random(order)
    for _ in range(60):
        max_age, count = random_.randint(1, 4), random_.randint(1, 5)
        groups: list[OpenGroup] = []
        for step in range(1, 25):
            for room in (max_age + 1, max_age):
                while len(groups) < room * count:
                    task = SimpleNamespace(is_done=False)
                    groups.append(OpenGroup(len(groups) + step * 1000, step + max_age, PromptPosition(0, 0), task))  # type: ignore[arg-type]
                if room == max_age:
                    break
                for group in groups:
                    group.task.is_done |= random_.random() < 0.4  # type: ignore[union-attr]
                taken = groups_of_step(groups, count, step, order)
                assert len(taken) == count
                groups = [group for group in groups if group not in taken]
                assert all(group.last_step > step for group in groups)
