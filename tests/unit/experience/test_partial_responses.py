"""Unfinished samples in a checkpoint: their tokens stay, and they continue where they were, whatever they wait for."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollout_parts import LetterTokenizer, ScriptedEnvironment, graded, prompts

from nemo_rl.algorithms.rollout.ahead import AheadRollouts
from nemo_rl.algorithms.rollout.source import FreshRollouts
from nemo_rl.config import OverlapConfig
from nemo_rl.data.loader import build_loader
from nemo_rl.data.streams.prompt_stream import PromptStream
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentInterface, StepResult
from nemo_rl.environments.workers.loading import traits_of
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.progress import GroupProgress, states_of
from nemo_rl.experience.rollouts import RolloutKey, RolloutLimits, RolloutRunner
from nemo_rl.experience.trajectory import Outcome, Trajectory
from nemo_rl.files.safe_load import is_plain, load_plain
from nemo_rl.kits.games.blackjack import BlackjackEnv
from nemo_rl.kits.games.sliding_puzzle import SlidingPuzzleEnv
from nemo_rl.kits.games.text_game import GameEnvironment
from nemo_rl.models.generation.interfaces import (
    GenerationInterface,
    GenerationRequest,
    GenerationResult,
    ResponseSoFar,
    SamplingParams,
    VersionSpan,
)
from nemo_rl.models.generation.responses import joined, rest_of
from nemo_rl.utils.errors import GenerationError

SAMPLING = SamplingParams(max_new_tokens=40, stop_token_ids=(0,))
KEY = RolloutKey(run_seed=1, phase="train", step=3)


class Writer(GenerationInterface):
    """Writes a letter for each token, all of which follow from the text; the first letter decides on the length.

    It writes `allowed` tokens of each response to a prompt of `least_prompt` tokens or more, and then waits; None: all
    of them. With `draws` the response also depends on the seed. A token takes `token_s` seconds.
    """

    token_s = 0.0

    def __init__(self, allowed: int | None = None, version: int = 0, draws: bool = False, least_prompt: int = 0):
        self.least_prompt = least_prompt
        self.allowed, self.weight_version, self.draws = allowed, version, draws
        self.written: dict[int, tuple[GenerationRequest, list[int]]] = {}
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(request)
        ids: list[int] = []
        self.written[id(request)] = (request, ids)
        try:
            while len(ids) < request.sampling.max_new_tokens and (not ids or ids[-1] != 0):
                while self.allowed is not None and len(ids) >= self.allowed and self.is_slow(request):
                    await asyncio.sleep(0.001)
                await asyncio.sleep(self.token_s)
                ids.append(self.next_token(request, ids))
        finally:
            del self.written[id(request)]
        reason = "stop" if ids[-1] == 0 else "length"
        return GenerationResult(*self.arrays(ids), reason, [VersionSpan(0, self.weight_version)])

    @property
    def num_written(self) -> list[int]:
        """Tokens of the open responses at which it waits."""
        return [len(ids) for request, ids in list(self.written.values()) if self.is_slow(request)]

    def is_slow(self, request: GenerationRequest) -> bool:
        return len(request.prompt_token_ids) >= self.least_prompt

    def next_token(self, request: GenerationRequest, ids: list[int]) -> int:
        text = request.prompt_token_ids + ids
        length = 4 + text[0] * 7 % 31 + (request.seed % 17 if self.draws else 0)
        return 97 + sum(text) % 26 if len(text) % length else 0

    def arrays(self, ids: list[int]) -> tuple[Any, Any]:
        return np.array(ids, np.int32), -np.array(ids, np.float32) / 100

    async def responses_so_far(self, requests: Any) -> list[ResponseSoFar | None]:
        found = [self.written.get(id(request), (request, None))[1] for request in requests]
        spans = [VersionSpan(0, self.weight_version)]
        return [None if ids is None else ResponseSoFar(*self.arrays(ids), spans if ids else []) for ids in found]

    def shutdown(self) -> None:
        pass


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    thread = EventLoopThread()
    yield thread
    thread.close()


def make_runner(loop: EventLoopThread, engine: GenerationInterface, environment: Any, turns: int = 1) -> RolloutRunner:
    limits = RolloutLimits(max_sequence_length=128, max_turns=turns, timeout_s=20.0)
    return RolloutRunner(engine, {"game": environment}, LetterTokenizer(), limits, loop)  # type: ignore[arg-type]


def ended(log: list[dict[str, Any]], metadata: Any) -> StepResult:
    return graded(float(len(log[-1]["content"])))


class Interrupted:
    """A group that plays until a condition holds, and its states, which went through a file."""

    def __init__(self, loop: EventLoopThread, folder: Path, runner: RolloutRunner, until: Callable[..., bool]):
        progress = GroupProgress()
        task = loop.start(runner.play_group(prompts("k"), 0, 2, SAMPLING, KEY, progress), "a group")
        end = time.monotonic() + 20
        while not (progress.samples and until(progress)):
            assert time.monotonic() < end
            time.sleep(0.002)
        (self.stored,) = runner.stored_samples([progress])
        assert self.stored is not None
        task.cancel()
        torch.save(self.stored.states, folder / "states.pt")
        self.states = load_plain(folder / "states.pt")

    def resumed(self, runner: RolloutRunner, loop: EventLoopThread) -> Any:
        group = runner.play_group(prompts("k"), 0, 2, SAMPLING, KEY, GroupProgress(stored=self.states))
        return loop.run(group, 20.0, "the group").trajectories


def test_a_response_continues_after_the_tokens_so_far(loop: EventLoopThread, tmp_path: Path) -> None:
    whole = make_runner(loop, Writer(), ScriptedEnvironment(ended)).collect(prompts("k"), 2, SAMPLING, KEY)
    slow = Writer(allowed=4, version=1)
    runner = make_runner(loop, slow, ScriptedEnvironment(ended))
    interrupted = Interrupted(loop, tmp_path, runner, lambda _: slow.num_written == [4, 4])
    engine = Writer(version=2)
    found = interrupted.resumed(make_runner(loop, engine, ScriptedEnvironment(ended)), loop)
    for sample, expected in zip(found, whole.trajectories, strict=True):
        assert sample.response_text == expected.response_text
        own, theirs = sample.message_log[-1], expected.message_log[-1]
        assert own["generation_logprobs"].tolist() == theirs["generation_logprobs"].tolist()
        assert sample.weight_versions == [(1, 1), (5, 2)]
        assert (sample.reward, sample.outcome) == (expected.reward, Outcome.FINISHED)
    assert interrupted.stored is not None
    assert interrupted.stored.num_lost_tokens == 0
    first = [request.seed for request in slow.requests]
    assert len({*first, *(request.seed for request in engine.requests)}) == 4
    assert all(request.sampling.max_new_tokens == 36 for request in engine.requests)


def test_a_finished_turn_is_graded_again_and_a_finished_sample_is_not(loop: EventLoopThread, tmp_path: Path) -> None:
    class Stuck(ScriptedEnvironment):
        async def step(self, message_log: list[dict[str, Any]], metadata: Any) -> StepResult:
            self.num_steps += 1
            if self.num_steps == 2:
                await asyncio.sleep(60)
            return self.judge(message_log, metadata)

    runner = make_runner(loop, Writer(), Stuck(ended))

    def one_is_finished(progress: GroupProgress) -> bool:
        return sorted((s.is_finished, s.finish_reason) for s in progress.samples) == [(False, "stop"), (True, None)]

    interrupted = Interrupted(loop, tmp_path, runner, one_is_finished)
    engine, environment = Writer(), ScriptedEnvironment(ended)
    found = interrupted.resumed(make_runner(loop, engine, environment), loop)
    assert engine.requests == []
    assert (environment.num_steps, environment.opened) == (1, [])
    assert len({sample.reward for sample in found}) == 1


def test_later_turns_continue_with_metadata_and_rewards_of_earlier_ones(loop: EventLoopThread, tmp_path: Path) -> None:
    def judge(log: list[dict[str, Any]], metadata: Any) -> StepResult:
        turn = metadata.get("turn", 0) + 1
        return graded(float(turn), metadata={**metadata, "turn": turn}, terminated=turn == 3)

    expected = make_runner(loop, Writer(), ScriptedEnvironment(judge), 3).collect(prompts("k"), 2, SAMPLING, KEY)
    slow = Writer(allowed=2, least_prompt=5)
    runner = make_runner(loop, slow, ScriptedEnvironment(judge), 3)
    interrupted = Interrupted(loop, tmp_path, runner, lambda _: slow.num_written == [2, 2])
    environment = ScriptedEnvironment(judge)
    found = interrupted.resumed(make_runner(loop, Writer(), environment, 3), loop)
    assert [sample.response_text for sample in found] == [sample.response_text for sample in expected.trajectories]
    assert [sample.turn_rewards for sample in found] == [[1.0, 2.0, 3.0]] * 2
    assert environment.opened == []


@pytest.mark.parametrize("problem", ["episode", "metadata", "bad words"])
def test_a_sample_that_cannot_continue_starts_again_and_its_tokens_are_counted(
    loop: EventLoopThread, tmp_path: Path, problem: str
) -> None:
    class Holding(ScriptedEnvironment):
        continues_episodes = problem != "episode"

        async def open_episode(self, metadata: Any, seed: int | None = None) -> Any:
            start = await super().open_episode(metadata, seed)
            handle = {"handle": threading.Lock()} if problem == "metadata" else {}
            return type(start)({**start.metadata, **handle})

    slow = Writer(allowed=4)
    runner = make_runner(loop, slow, Holding(ended))
    sampling = replace(SAMPLING, bad_words=("x",) if problem == "bad words" else ())
    progress = GroupProgress()
    task = loop.start(runner.play_group(prompts("k"), 0, 2, sampling, KEY, progress), "a group")
    while slow.num_written != [4, 4]:
        assert not task.is_done
    (stored,) = runner.stored_samples([progress])
    task.cancel()
    assert stored is not None
    assert (stored.states, stored.num_lost_tokens) == ([None, None], 8)
    group = runner.play_group(prompts("k"), 0, 2, sampling, KEY, GroupProgress(stored=stored.states))
    slow.allowed = None
    again = loop.run(group, 20.0, "the group").trajectories
    whole = make_runner(loop, Writer(), ScriptedEnvironment(ended)).collect(prompts("k"), 2, sampling, KEY)
    assert [sample.response_text for sample in again] == [sample.response_text for sample in whole.trajectories]


def test_a_sample_that_begins_another_turn_meanwhile_is_asked_for_again() -> None:
    """The engine answers the first request while it is asked for its tokens."""

    class Racing(GenerationInterface):
        asked = 0

        async def generate(self, request: GenerationRequest) -> GenerationResult:
            raise GenerationError("not called")

        async def responses_so_far(self, requests: Any) -> list[ResponseSoFar | None]:
            self.asked += 1
            if self.asked == 1:
                sample.request, second.request = GenerationRequest([2], SAMPLING, 2), second.request
                return [None, ResponseSoFar(np.array([5]), np.array([-1.0]), [VersionSpan(0, 0)])]
            return [ResponseSoFar(np.array([7, 8]), np.array([-1.0, -2.0]), [VersionSpan(0, 0)]) for _ in requests]

        def shutdown(self) -> None:
            pass

    group = GroupProgress()
    message = {"role": "user", "content": "k", "token_ids": torch.tensor([107])}
    sample, second = group.begin([Trajectory(0, index, 0, "game", [message], 1) for index in range(2)])
    for index, each in enumerate((sample, second)):
        each.is_open, each.request = True, GenerationRequest([index], SAMPLING, index)
    (stored,) = asyncio.run(states_of([group], Racing(), lambda _: True))
    assert stored is not None
    assert [state["token_ids"].tolist() for state in stored.states if state is not None] == [[7, 8], [5]]


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ({"a": [1, 2.5, "x", None, True, b"y", (1, torch.ones(2))]}, True),
        ({"a": {3, 4}}, False),
        ([np.float64(1.0)], False),
        (Outcome.FINISHED, False),
    ],
)
def test_plain_values_are_those_that_a_checkpoint_loads(value: Any, plain: bool, tmp_path: Path) -> None:
    assert is_plain(value) == plain
    if plain:
        torch.save(value, tmp_path / "value.pt")
        assert str(load_plain(tmp_path / "value.pt")) == str(value)


def test_episodes_continue_unless_a_process_holds_something() -> None:
    class Plain(EnvironmentInterface[Any]):
        def step(self, message_log_batch: Any, metadata: Any) -> Any:
            raise NotImplementedError

    class Closing(Plain):
        def close_episode(self, metadata: Any) -> None:
            raise NotImplementedError

    class ClosingButStored(Closing):
        continues_episodes = True

    classes = (Plain, Closing, ClosingButStored)
    assert [traits_of(each, {}).continues_episodes for each in classes] == [True, False, True]
    games = (GameEnvironment, SlidingPuzzleEnv, BlackjackEnv)
    assert [traits_of(each, {}).continues_episodes for each in games] == [False, True, True]


def letters(text: str, *spans: tuple[int, int]) -> Any:
    ids = np.array([ord(letter) for letter in text], np.int32)
    return ids, np.zeros(len(ids), np.float32), [VersionSpan(*span) for span in spans]


@pytest.mark.parametrize(
    ("first", "rest", "reason", "text", "end"),
    [
        ("abc", "def", "length", "abcdef", "length"),
        ("abEN", "Dxyz", "length", "abEND", "stop"),
        ("abEN", "DxEND", "stop", "abEND", "stop"),
        ("abE", "xEND", "stop", "abExEND", "stop"),
    ],
)
def test_a_stop_string_across_both_parts_ends_the_response(
    first: str, rest: str, reason: Any, text: str, end: str
) -> None:
    so_far = ResponseSoFar(*letters(first, (0, 3)))
    ids, logprobs, spans = letters(rest, (0, 3), (2, 4))
    whole = joined(so_far, GenerationResult(ids, logprobs, reason, spans), ["END"], LetterTokenizer())  # type: ignore[arg-type]
    assert (LetterTokenizer().decode(whole.token_ids.tolist()), whole.finish_reason) == (text, end)
    assert len(whole.logprobs) == len(text)
    changed = [(len(first) + 2, 4)] if len(text) > len(first) + 2 else []
    assert whole.weight_versions == [(0, 3), *changed]


def test_the_rest_is_asked_for_with_another_seed_and_less_room() -> None:
    request = GenerationRequest([1, 2], SamplingParams(max_new_tokens=10), seed=5)
    assert rest_of(request, ResponseSoFar.nothing()) is request
    rest = rest_of(request, ResponseSoFar(*letters("abc", (0, 0))))
    assert (rest.prompt_token_ids, rest.sampling.max_new_tokens) == ([1, 2, 97, 98, 99], 7)
    assert rest.seed != request.seed
    assert rest.seed == rest_of(request, ResponseSoFar(*letters("abc", (0, 0)))).seed


NUM_PROMPTS, PER_STEP = 24, 4


def collate(rows: list[int]) -> BatchedDataDict[Any]:
    batch = prompts(*(chr(200 + row) for row in rows))
    batch["idx"] = list(rows)
    return batch


class Epoch:
    """A run over one epoch that may be killed between two steps."""

    def __init__(self, loop: EventLoopThread, draws: bool, **keys: Any):
        self.keys, self.loop, self.draws = keys, loop, draws
        self.trained: Counter[tuple[int, int, str]] = Counter()
        self.tokens: Counter[str] = Counter()
        self.step = 0
        self.begin(None)

    def begin(self, state: dict[str, Any] | None) -> None:
        engine = Writer(version=self.step, draws=self.draws)
        engine.token_s = 0.001
        runner = make_runner(self.loop, engine, ScriptedEnvironment(ended))
        loader = build_loader(range(NUM_PROMPTS), PER_STEP, shuffle=True, seed=3, collate_fn=collate)
        self.stream = PromptStream(loader, max_epochs=1)
        fresh = FreshRollouts(self.stream, runner, SAMPLING, 2, 5)
        overlap = OverlapConfig.build(**self.keys)
        num_steps = NUM_PROMPTS // PER_STEP
        self.source = AheadRollouts(fresh, PER_STEP, overlap, num_steps) if overlap.mode == "ahead" else fresh
        if state is not None:
            self.stream.load_state_dict(state)

    def run(self, folder: Path | None = None) -> None:
        """Train; with a folder, a new process goes on from a checkpoint after each step."""
        while self.step < NUM_PROMPTS // PER_STEP:
            self.step += 1
            groups = list(self.source.next_groups(self.step))
            samples = [sample for group in groups for sample in group.trajectories]
            self.trained.update((sample.idx, sample.sample_index, sample.response_text) for sample in samples)
            self.tokens.update({k: v for k, v in self.source.metrics.items() if k.endswith("_tokens")})
            self.stream.acknowledge(group.prompt for group in groups if group.prompt is not None)
            if folder is not None:
                torch.save(self.stream.state_dict(), folder / "position.pt")
                self.begin(load_plain(folder / "position.pt"))


@pytest.mark.parametrize("partial", ["continue", "restart"])
@pytest.mark.parametrize("order", ["in_order", "ready_first", "weight_fifo", "freshest_first"])
def test_killed_runs_train_on_what_a_run_without_overlap_samples_short_or_long(
    loop: EventLoopThread, tmp_path: Path, order: str, partial: str
) -> None:
    """Short answers finish long before long ones, so a preference for finished ones would show in the lengths."""
    draws = partial == "restart"  # the same seeds again; a continued response has others
    in_turns = Epoch(loop, draws)
    in_turns.run()
    keys = {"order": order, "max_age_steps": 3, "in_flight_weight_updates": True, "partial_responses": partial}
    killed = Epoch(loop, draws, mode="ahead", **keys)
    killed.run(tmp_path)
    assert len({len(text) for _, _, text in in_turns.trained}) > 10
    assert killed.trained == in_turns.trained
    names = ["num_continued_tokens", "num_restarted_tokens"]
    used, unused = names if partial == "continue" else reversed(names)
    assert killed.tokens[used] > 0
    assert killed.tokens[unused] == 0
