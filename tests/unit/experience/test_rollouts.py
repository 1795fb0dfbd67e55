"""Rollouts: order, seeds, turns, limits, and errors that stay errors."""

import gc
import math
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from rollout_parts import LetterTokenizer, ScriptedEngine, ScriptedEnvironment, graded, prompts

from nemo_rl.data.model_rows import RowInput, RowInputs
from nemo_rl.experience import rollouts
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.metrics import metrics_by_environment, rollout_metrics, validation_metrics
from nemo_rl.experience.rollouts import RolloutKey, RolloutLimits, RolloutRunner
from nemo_rl.experience.trajectory import Outcome, Trajectory
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, SamplingParams, VersionSpan
from nemo_rl.utils.errors import ConfigError, DeadlineExceededError, GenerationError

pytestmark = pytest.mark.fast

SAMPLING = SamplingParams(max_new_tokens=8, stop_token_ids=(0,))
KEY = RolloutKey(run_seed=1, phase="train", step=3)


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    thread = EventLoopThread()
    yield thread
    thread.close()


def make_runner(loop: EventLoopThread, engine: ScriptedEngine, environment: Any, **limits: Any) -> RolloutRunner:
    bounds = {"max_sequence_length": 64, "max_turns": 1, "timeout_s": 20.0} | limits
    return RolloutRunner(engine, {"game": environment}, LetterTokenizer(), RolloutLimits(**bounds), loop)


def test_trajectories_come_ordered_by_prompt_and_sample_with_the_engines_tokens(
    loop: EventLoopThread,
) -> None:
    engine = ScriptedEngine(lambda r: [ord("a") + r.seed % 3, 0])
    environment = ScriptedEnvironment(lambda log, meta: graded(float(len(log))))
    runner = make_runner(loop, engine, environment)
    found = runner.collect(prompts("one", "two"), 3, SAMPLING, KEY).trajectories
    assert [(t.group_index, t.sample_index) for t in found] == [(g, s) for g in (0, 1) for s in (0, 1, 2)]
    by_prompt = {tuple(r.prompt_token_ids): [] for r in engine.requests}
    for request in engine.requests:
        by_prompt[tuple(request.prompt_token_ids)].append(request.seed)
    assert all(len(set(seeds)) == 3 for seeds in by_prompt.values())
    for t in found:
        answer = t.message_log[-1]
        assert answer["role"] == "assistant"
        assert answer["token_ids"].tolist()[-1] == 0
        assert answer["generation_logprobs"].tolist() == [-0.5, -0.5]
        assert (t.reward, t.idx, t.weight_versions) == (2.0, 100 + t.group_index, [(t.prompt_length, 7)])
        assert (t.prompt_length, t.response_length, t.outcome) == (3, 2, Outcome.FINISHED)


def test_the_engines_text_is_taken_and_its_arrays_are_copied(loop: EventLoopThread) -> None:
    received = np.frombuffer(np.array([97, 0], np.int32).tobytes(), np.int32), np.zeros(2, np.float32)

    class Engine(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            return GenerationResult(*received, "stop", [VersionSpan(0, 7)], text="as the engine reads it")

    environment = ScriptedEnvironment(lambda log, meta: graded(float(log[-1]["content"] == "as the engine reads it")))
    runner = make_runner(loop, Engine(lambda r: []), environment)
    (found,) = runner.collect(prompts("one"), 1, SAMPLING, KEY).trajectories
    answer = found.message_log[-1]
    assert (answer["content"], found.reward) == ("as the engine reads it", 1.0)
    assert (answer["token_ids"].tolist(), answer["token_ids"].dtype) == ([97, 0], torch.int64)
    kept = answer["token_ids"], answer["generation_logprobs"]
    assert not any(np.shares_memory(array, tensor.numpy()) for array, tensor in zip(received, kept, strict=True))


@pytest.mark.parametrize(("many", "is_rare"), [(2, True), (3, False)])
def test_many_samples_make_searches_among_all_objects_rare_and_leave_those_among_the_young(
    loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch, many: int, is_rare: bool
) -> None:
    monkeypatch.setattr(rollouts, "_MANY_SAMPLES", many)
    before = gc.get_threshold()
    runner = make_runner(loop, ScriptedEngine(lambda r: [97, 0]), ScriptedEnvironment(lambda log, meta: graded(1.0)))
    try:
        for _ in range(2):
            runner.collect(prompts("one"), 2, SAMPLING, KEY)
        assert gc.get_threshold() == (*before[:2], 1000 if is_rare else before[2])
    finally:
        gc.set_threshold(*before)


def test_seeds_depend_on_the_key_and_nothing_else(loop: EventLoopThread) -> None:
    def seeds(key: RolloutKey) -> list[int]:
        engine = ScriptedEngine(lambda r: [0])
        make_runner(loop, engine, ScriptedEnvironment(lambda log, meta: graded(1.0))).collect(
            prompts("ab", "cd"), 2, SAMPLING, key
        )
        return sorted(request.seed for request in engine.requests)

    assert seeds(KEY) == seeds(KEY)
    assert not set(seeds(KEY)) & set(seeds(RolloutKey(1, "train", 4)))
    assert not set(seeds(KEY)) & set(seeds(RolloutKey(1, "validation", 3)))
    assert not set(seeds(KEY)) & set(seeds(RolloutKey(1, "train", 3, round=1)))


def test_several_turns_keep_the_exact_prefix_and_add_rewards(loop: EventLoopThread) -> None:
    engine = ScriptedEngine(lambda r: [ord("x"), ord("y")])

    def judge(log: list[dict[str, Any]], count: Any) -> Any:
        turn = (count or {}).get("turn", 0) + 1
        return graded(
            0.25,
            terminated=turn == 3,
            metadata={"turn": turn},
            observation={"role": "environment", "content": "go"},
        )

    runner = make_runner(loop, engine, ScriptedEnvironment(judge), max_turns=5)
    (t,) = runner.collect(prompts("p"), 1, SAMPLING, KEY).trajectories
    assert "".join(m["content"] for m in t.message_log) == "pxygoxygoxy"
    prefixes = ["".join(map(chr, r.prompt_token_ids)) for r in engine.requests]
    assert prefixes == ["p", "pxygo", "pxygoxygo"]
    assert len({r.seed for r in engine.requests}) == 3
    assert (t.reward, t.num_turns, t.outcome, t.response_length) == (0.75, 3, Outcome.FINISHED, 6)


def test_a_response_never_grows_past_the_sequence_limit(loop: EventLoopThread) -> None:
    engine = ScriptedEngine(lambda r: [ord("z")] * 50)
    environment = ScriptedEnvironment(lambda log, meta: graded(1.0))
    runner = make_runner(loop, engine, environment, max_sequence_length=10)
    short, full = runner.collect(prompts("abc", "x" * 10), 1, SAMPLING, KEY).trajectories
    assert (short.length, short.outcome) == (10, Outcome.TRUNCATED)
    assert (full.outcome, full.reward, full.num_turns) == (Outcome.PROMPT_TOO_LONG, None, 0)


def test_an_observation_without_room_ends_the_episode(loop: EventLoopThread) -> None:
    engine = ScriptedEngine(lambda r: [ord("a")] * 4)
    talk = {"role": "environment", "content": "w" * 30}
    environment = ScriptedEnvironment(lambda log, meta: graded(0.5, terminated=False, observation=talk))
    runner = make_runner(loop, engine, environment, max_turns=9, max_sequence_length=20)
    (t,) = runner.collect(prompts("hi"), 1, SAMPLING, KEY).trajectories
    assert (t.outcome, t.length, t.reward, t.num_turns) == (Outcome.TRUNCATED, 6, 0.5, 1)


def test_a_failed_grading_is_an_outcome_and_never_a_zero(loop: EventLoopThread) -> None:
    engine = ScriptedEngine(lambda r: [r.prompt_token_ids[0], 0])

    def judge(log: list[dict[str, Any]], meta: Any) -> Any:
        if log[0]["content"] == "bad":
            return graded(None, error="grader exploded")
        return graded(1.0)

    runner = make_runner(loop, engine, ScriptedEnvironment(judge))
    good, bad = runner.collect(prompts("good", "bad"), 1, SAMPLING, KEY).trajectories
    assert (good.reward, good.outcome, good.has_reward) == (1.0, Outcome.FINISHED, True)
    assert (bad.reward, bad.outcome, bad.error) == (None, Outcome.REWARD_ERROR, "grader exploded")
    metrics = rollout_metrics([good, bad])
    assert metrics["reward"] == 1.0
    assert metrics["num_reward_errors"] == 1.0
    assert metrics["reward_error_rate"] == 0.5


def test_metrics_of_each_environment_are_for_runs_with_several() -> None:
    assert metrics_by_environment([], ["math"], ["num_samples"]) == {}
    both = {"math/num_samples": 0.0, "code/num_samples": 0.0}
    assert metrics_by_environment([], ["math", "code"], ["num_samples", "reward"]) == both


def test_the_failure_of_all_samples_is_told_once_and_with_its_own_cause(loop: EventLoopThread) -> None:
    failure = AssertionError("engine broke")
    failure.__cause__ = RuntimeError("traceback of the worker")

    def script(request: GenerationRequest) -> list[int]:
        raise failure

    runner = make_runner(loop, ScriptedEngine(script), ScriptedEnvironment(lambda log, meta: graded(1.0)))
    with pytest.raises(AssertionError, match="engine broke") as caught:
        runner.collect(prompts("a", "b"), 8, SAMPLING, KEY)
    told = "".join(traceback.format_exception(caught.value))
    assert told.count("engine broke") == 1
    assert "traceback of the worker" in told


def test_reward_components_are_kept_and_summed(loop: EventLoopThread) -> None:
    environment = ScriptedEnvironment(lambda log, meta: graded({"right": 1.0, "format": 0.5}))
    runner = make_runner(loop, ScriptedEngine(lambda r: [0]), environment)
    (t,) = runner.collect(prompts("q"), 1, SAMPLING, KEY).trajectories
    assert (t.reward, t.reward_components) == (1.5, {"right": 1.0, "format": 0.5})


def test_stop_strings_of_a_turn_end_with_the_turn(loop: EventLoopThread) -> None:
    answers = [["</tool>"], None, [], ["</end>", "</cfg>"]]

    def judge(log: list[dict[str, Any]], turn: Any) -> Any:
        number = turn.get("turn", 0)
        return graded(
            0.0,
            terminated=number == len(answers),
            metadata={"turn": number + 1},
            observation={"role": "environment", "content": "go"},
            next_stop_strings=answers[number] if number < len(answers) else None,
        )

    engine = ScriptedEngine(lambda r: [ord("x")])
    runner = make_runner(loop, engine, ScriptedEnvironment(judge), max_turns=9)
    sampling = SamplingParams(max_new_tokens=8, stop_strings=("</cfg>",))
    runner.collect(prompts("a", stop_strings=[["</row>"]]), 1, sampling, KEY)
    assert [request.sampling.stop_strings for request in engine.requests] == [
        ("</cfg>", "</row>"),
        ("</cfg>", "</tool>"),
        ("</cfg>", "</row>"),
        ("</cfg>",),
        ("</cfg>", "</end>"),
    ]


def test_stop_strings_of_the_data_reach_the_engine(loop: EventLoopThread) -> None:
    engine = ScriptedEngine(lambda r: [0])
    environment = ScriptedEnvironment(lambda log, meta: graded(1.0))
    batch = prompts("a", "b", stop_strings=[["</x>"], None])
    make_runner(loop, engine, environment).collect(batch, 1, SAMPLING, KEY)
    stops = {r.prompt_token_ids[0]: r.sampling.stop_strings for r in engine.requests}
    assert stops == {ord("a"): ("</x>",), ord("b"): ()}


def test_an_unknown_environment_is_named(loop: EventLoopThread) -> None:
    runner = make_runner(loop, ScriptedEngine(lambda r: [0]), ScriptedEnvironment(lambda log, meta: graded(1.0)))
    with pytest.raises(ConfigError, match=r"environment 'chess'; running are \['game'\]"):
        runner.collect(prompts("q", task_name=["chess"]), 1, SAMPLING, KEY)


def test_what_breaks_one_sample_surfaces_as_itself(loop: EventLoopThread) -> None:
    class Broken(ScriptedEngine):
        async def generate(self, request: Any) -> Any:
            raise GenerationError("the engine is broken")

    environment = ScriptedEnvironment(lambda log, meta: graded(1.0))
    runner = make_runner(loop, Broken(lambda r: [0]), environment)
    with pytest.raises(GenerationError, match="the engine is broken"):
        runner.collect(prompts("q", "r"), 2, SAMPLING, KEY)


def test_a_collection_has_a_deadline(loop: EventLoopThread) -> None:
    class Stuck(ScriptedEngine):
        async def generate(self, request: Any) -> Any:
            import asyncio

            await asyncio.sleep(60)

    environment = ScriptedEnvironment(lambda log, meta: graded(1.0))
    runner = make_runner(loop, Stuck(lambda r: [0]), environment, timeout_s=0.2)
    with pytest.raises(DeadlineExceededError, match=r"train step 3 .*rollout_s.* 0.2 s"):
        runner.collect(prompts("q"), 1, SAMPLING, KEY)


def test_validation_metrics_by_hand() -> None:
    def sample(group: int, reward: float | None, outcome: Outcome = Outcome.FINISHED) -> Trajectory:
        log = [
            {
                "role": "assistant",
                "content": "",
                "token_ids": torch.zeros(4, dtype=torch.int64),
                "generation_logprobs": torch.zeros(4),
            }
        ]
        return Trajectory(group, 0, 0, "game", log, 0, reward=reward, outcome=outcome)

    found = [
        sample(0, 1.0),
        sample(0, 0.0),
        sample(1, 0.0),
        sample(1, None, Outcome.REWARD_ERROR),
    ]
    metrics = validation_metrics(found, num_generations=2)
    assert metrics["accuracy"] == pytest.approx(1 / 3)
    assert metrics["pass_k"] == 0.5
    assert metrics["avg_length"] == 4
    assert metrics["num_reward_errors"] == 1
    # A reward above 0 solves a prompt: the first of these does, 0 and -1 do not.
    partly = [sample(0, 0.5), sample(0, 0.0), sample(1, -1.0), sample(1, 0.0), sample(2, None)]
    assert validation_metrics(partly, num_generations=2)["pass_k"] == pytest.approx(1 / 3)


def test_means_of_nothing_are_left_out() -> None:
    log = [{"role": "user", "content": "", "token_ids": torch.zeros(4, dtype=torch.int64)}]
    failed = Trajectory(0, 0, 0, "game", log, 4, reward=None, outcome=Outcome.REWARD_ERROR)
    for found in ([failed, failed], []):
        for metrics in (rollout_metrics(found), validation_metrics(found, num_generations=2)):
            assert all(math.isfinite(value) for value in metrics.values())
            assert not {"reward", "mean_total_reward", "max_total_reward", "accuracy"} & metrics.keys()
            assert metrics["num_reward_errors"] == len(found)


def test_every_turn_sends_the_inputs_of_its_row_and_the_trajectory_keeps_them(loop: EventLoopThread) -> None:
    readings = RowInputs({"readings": RowInput(torch.ones(2, 3))})
    batch = prompts("one", "two")
    batch["row_inputs"] = [readings, RowInputs()]
    engine = ScriptedEngine(lambda r: [ord("a"), 0])
    runner = make_runner(loop, engine, ScriptedEnvironment(lambda log, meta: graded(1.0)))
    found = runner.collect(batch, 2, SAMPLING, KEY).trajectories
    assert [sample.row_inputs is readings for sample in found] == [True, True, False, False]
    sent = [request for request in engine.requests if request.row_inputs is readings]
    assert len(sent) == 2 and len({tuple(request.prompt_token_ids) for request in sent}) == 1
