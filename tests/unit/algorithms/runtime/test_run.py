"""The one loop, with parts made for it: the order of things, who has the devices, and what a checkpoint remembers."""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from numbered_prompts import make_stream
from run_parts import session_parts, start_session

from nemo_rl.algorithms.rollout.batches import RolloutBatches
from nemo_rl.algorithms.rollout.source import FreshRollouts, Group
from nemo_rl.algorithms.runtime.device_sharing import MemorySharing
from nemo_rl.algorithms.runtime.resume_check import DATA_POSITION_FILE
from nemo_rl.algorithms.runtime.run import Run, StepBatch, train
from nemo_rl.algorithms.runtime.session import Cadence
from nemo_rl.algorithms.setup.roles import start_together
from nemo_rl.algorithms.setup.run_folders import RunFolders
from nemo_rl.data.streams.prompt_stream import DataExhausted, PromptPosition, PromptStream
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.idle_shares import BusySeconds, IdleShares
from nemo_rl.experience.rollouts import Collection
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.files.safe_load import load_plain
from nemo_rl.launch.command_line import exit_status
from nemo_rl.models.generation.interfaces import VersionSpan
from nemo_rl.utils.errors import ConfigError, DataError, WorkerDiedError

pytestmark = pytest.mark.fast


class Recorder:
    """A user on shared devices, a stage and a model, which write down what happens."""

    def __init__(self, events: list[str], name: str, roles: tuple[str, ...] = ()):
        self.events, self.name, self.roles = events, name, roles
        self.trained_on: list[int] = []

    def rest(self) -> None:
        self.events.append(f"{self.name} rests")

    def wake(self) -> None:
        self.events.append(f"{self.name} wakes")

    def apply(self, batch: StepBatch) -> dict[str, float]:
        self.events.append(self.name)
        return {self.name: 1.0}

    def train(self, data: Any, loss_fn: Any, gbs: int | None = None) -> dict[str, Any]:
        self.events.append(f"update of {gbs} rows")
        self.trained_on += data["idx"]
        return {"metrics": {"loss": 0.5, "global_valid_toks": 2.0}}

    def save_checkpoint(self, weights: str, optimizer: str | None, tokenizer: str | None, consolidated: bool) -> None:
        Path(weights).mkdir(parents=True)


def make_prompts(max_epochs: int = 2) -> PromptStream:
    """Epochs of four batches with one prompt each, `idx` 1 to 4."""

    def collate(rows: list[int]) -> BatchedDataDict[Any]:
        return BatchedDataDict({"idx": [row + 1 for row in rows]})

    return make_stream(4, 1, max_epochs, shuffle=False, collate_fn=collate)


def trajectory(idx: int) -> Trajectory:
    message = {"role": "assistant", "content": "", "token_ids": torch.tensor([idx])}
    return Trajectory(0, 0, idx, "math", [message | {"generation_logprobs": torch.zeros(1)}], 0, reward=1.0)


class SamplesAhead:
    """A source that draws two prompts ahead of training and keeps what is not trained on in its state."""

    max_staleness = 0

    def __init__(self, prompts: PromptStream):
        self.prompts = prompts
        self.metrics: dict[str, float] = {}
        self.ahead: list[PromptPosition] = []
        prompts.attach("ahead", self)

    def next_groups(self, step: int) -> Iterator[Group]:
        while len(self.ahead) < 3:
            try:
                self.ahead += self.prompts.next_batch().positions
            except DataExhausted:
                break
        if not self.ahead:
            raise DataExhausted("no prompt is left")
        prompt = self.ahead.pop(0)
        yield Group((0, 0), [trajectory(prompt.row + 1)], prompt)

    def state_dict(self) -> dict[str, Any]:
        return {"prompts": [list(prompt) for prompt in self.ahead]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ahead = [PromptPosition(*prompt) for prompt in state["prompts"]]
        self.prompts.claim(self.ahead)


def one_group(sample: Trajectory) -> Generator[list[Trajectory], None, dict[str, float]]:
    yield [sample]
    return {"math/asked": 1.0}


def layout(trajectories: Any) -> BatchedDataDict[Any]:
    return BatchedDataDict({"idx": [t.idx for t in trajectories]})


def batches_of(
    source: Any, prompts: PromptStream, weight_version: int = 0, ensure_fresh: Callable[[], None] = lambda: None
) -> RolloutBatches:
    """Batches of a source; the probe and the sample log do nothing."""
    refitter: Any = SimpleNamespace(
        ensure_fresh=ensure_fresh,
        before_training=lambda: None,
        last_sync={"sync_s": 0.1},
        weight_version=weight_version,
    )
    quiet: Any = SimpleNamespace(check=lambda batch, num_stale_B: None, write_training=lambda *_: None)
    idle = IdleShares(lambda: BusySeconds([], 0.0))
    return RolloutBatches(
        rollouts=source,
        prompts=prompts,
        refitter=refitter,
        probe=quiet,
        layout=layout,
        trajectory_log=quiet,
        idle=idle,
    )


def make_run(
    folder: Path, steps: int, events: list[str], source: Any = SamplesAhead, prompts: PromptStream | None = None
) -> Run:
    """A run that continues from the newest checkpoint below `folder`."""
    prompts = prompts or make_prompts()
    batches = batches_of(source(prompts), prompts, ensure_fresh=lambda: events.append("sync"))
    policy = Recorder(events, "policy")
    parts = session_parts(folder, Cadence(steps, save_period=1), prompts, models={"policy": policy}, save_period=1)
    users = {name: Recorder(events, name) for name in ("generation", "teacher", "policy")}
    return Run(
        session=start_session(parts),
        source=batches,
        stages=[Recorder(events, "scores", roles=("teacher",)), Recorder(events, "credit")],
        roles={"policy": policy},  # type: ignore[dict-item]
        loss_fn=None,  # type: ignore[arg-type]
        memory=MemorySharing(users),
        resources=ExitStack(),
    )


def test_a_step_runs_its_stages_in_order_and_hands_the_devices_on(tmp_path: Path) -> None:
    events: list[str] = []
    train(make_run(tmp_path, 1, events))
    assert events == [
        *("sync", "generation rests", "policy rests", "teacher wakes", "scores", "credit"),
        *("generation rests", "teacher rests", "policy wakes", "update of None rows"),
    ]


def test_memory_stays_where_it_is_for_those_who_share_none() -> None:
    events: list[str] = []
    memory = MemorySharing({"policy": Recorder(events, "policy")})
    memory.hand_to(())
    memory.hand_to(("teacher",))
    assert events == []
    memory.hand_to(("policy",))
    memory.hand_to(("policy",))
    assert events == ["policy wakes"]


@pytest.mark.parametrize("kill_before_save", [False, True])
def test_what_was_sampled_ahead_is_neither_lost_nor_trained_on_twice(tmp_path: Path, kill_before_save: bool) -> None:
    """A run that samples ahead ends after three steps, or dies in the fourth; the next one goes on."""
    run = make_run(tmp_path, 8 if kill_before_save else 3, [])
    if kill_before_save:

        class Killed(Exception):  # noqa: N818
            pass

        def die_in_the_fourth(batch: StepBatch) -> dict[str, float]:
            if batch.tensors["idx"] == [4]:
                raise Killed
            return {}

        run.stages[0].apply = die_in_the_fourth  # type: ignore[method-assign]
        with pytest.raises(Killed):
            train(run)
    else:
        train(run)
    assert run.policy.trained_on == [1, 2, 3]  # type: ignore[attr-defined]
    assert len(run.source.rollouts.ahead) == 2  # type: ignore[attr-defined]
    second = make_run(tmp_path, 99, [])
    train(second)
    assert second.policy.trained_on == [4, 1, 2, 3, 4]  # type: ignore[attr-defined]


def test_a_position_with_what_was_sampled_ahead_is_accepted_before_anything_starts(tmp_path: Path) -> None:
    source = SamplesAhead(make_prompts())
    (group,) = source.next_groups(1)
    source.prompts.acknowledge([group.prompt])
    torch.save(source.prompts.state_dict(), tmp_path / DATA_POSITION_FILE)
    position = load_plain(tmp_path / DATA_POSITION_FILE)
    assert position["parts"] == {"ahead": {"prompts": [[0, 1], [0, 2]]}}
    prompts = make_prompts()
    untouched = prompts.state_dict()
    folders = RunFolders(tmp_path, None, tmp_path, lambda *_: None, position)
    folders.check_position(prompts)
    assert prompts.state_dict() == untouched
    with pytest.raises(DataError, match="num_rows was 5 and is 4"):
        position["loader"]["num_rows"] = 5
        folders.check_position(prompts)


def test_a_source_put_in_after_the_start_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    train(make_run(tmp_path, 3, []))
    prompts = make_prompts()
    run = make_run(tmp_path, 99, [], prompts=prompts)
    at_first = run.source.rollouts  # type: ignore[attr-defined]
    run.source.rollouts = put_in = SamplesAhead(prompts)  # type: ignore[attr-defined]
    train(run)
    assert run.policy.trained_on == [4, 1, 2, 3, 4]  # type: ignore[attr-defined]
    assert (at_first.ahead, put_in.ahead) == ([], [])


def test_a_position_never_runs_ahead_of_what_was_trained() -> None:
    runner = SimpleNamespace(stream=lambda batch, *_: Collection(one_group(trajectory(batch["idx"][0]))))
    source = FreshRollouts(make_prompts(1), runner, None, 1, 0)  # type: ignore[arg-type]
    start = source.prompts.state_dict()
    groups = [*source.next_groups(1), *source.next_groups(1)]
    assert [group.order for group in groups] == [(0, 0), (1, 0)]
    assert source.prompts.state_dict() == start
    source.prompts.acknowledge(group.prompt for group in groups)  # type: ignore[misc]
    after = source.prompts.state_dict()
    assert after == {"epoch": 0, "loader": start["loader"] | {"num_batches_done": 2}}
    fresh = FreshRollouts(make_prompts(1), runner, None, 1, 0)  # type: ignore[arg-type]
    fresh.prompts.load_state_dict(after)
    (group,) = fresh.next_groups(2)
    assert group.trajectories[0].idx == 3
    assert fresh.metrics == {"math/asked": 1.0}


def test_prompts_of_groups_that_are_left_out_are_done_with_the_step() -> None:
    prompts = make_prompts(1)

    class HalfOfThem(SamplesAhead):
        def next_groups(self, step: int) -> Iterator[Group]:
            batches = [self.prompts.next_batch() for _ in range(2)]
            for index, batch in enumerate(batches):
                yield Group((0, index), [trajectory(batch.rows["idx"][0])], batch.positions[0], trains=index == 1)

    source = batches_of(HalfOfThem(prompts), prompts)
    batch = source.next_batch(1, lambda name: nullcontext())
    assert (batch.tensors["idx"], batch.num_prompts, len(batch.prompts)) == ([2], 1, 2)
    assert batch.rewards == dict.fromkeys(batch.prompts, [1.0]), "also of the group that is left out"
    assert prompts.state_dict()["loader"]["num_batches_done"] == 0
    source.trained(1, batch)
    assert prompts.state_dict()["loader"]["num_batches_done"] == 2
    assert "outstanding" not in prompts.state_dict()


def test_a_group_that_is_older_than_its_source_states_is_refused() -> None:
    class Old(SamplesAhead):
        max_staleness = 2

        def next_groups(self, step: int) -> Iterator[Group]:
            sample = trajectory(1)
            sample.weight_versions = [VersionSpan(0, 4)]
            yield Group((0, 0), [sample])

    prompts = make_prompts()
    source = batches_of(Old(prompts), prompts, weight_version=6)
    batch = source.next_batch(1, lambda name: nullcontext())
    assert batch.num_stale_B is not None and batch.num_stale_B.tolist() == [1]
    assert (batch.metrics["avg_trajectory_age"], batch.metrics["max_trajectory_age"]) == (2.0, 2.0)
    with pytest.raises(ValueError, match=r"sampled 3 weight versions ago; its max_staleness is 2"):
        batches_of(Old(prompts), prompts, weight_version=7).next_batch(2, lambda name: nullcontext())


def test_groups_are_trained_on_in_their_order_whenever_they_finish() -> None:
    class Late:
        metrics = {"asked": 2.0}
        max_staleness = 0

        def next_groups(self, step: int) -> Iterator[Group]:
            for order in ((1, 0), (0, 4), (0, 2)):
                yield Group(order, [trajectory(10 * order[0] + order[1])])

    source = batches_of(Late(), make_prompts())
    batch = source.next_batch(1, lambda name: nullcontext())
    assert batch.tensors["idx"] == [2, 4, 10]
    assert [t.group_index for t in batch.trajectories] == [0, 1, 2]
    assert (batch.num_prompts, batch.metrics["asked"]) == (3, 2.0)


class Started:
    def __init__(self, ended: list[str], name: str, fails_to_end: bool = False):
        self.ended, self.name, self.fails_to_end = ended, name, fails_to_end

    def shutdown(self) -> None:
        self.ended.append(self.name)
        if self.fails_to_end:
            raise RuntimeError(f"{self.name} does not end")


def test_all_that_failed_to_start_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    ended: list[str] = []

    def fail(error: Exception) -> Started:
        raise error

    starts = {
        "engines": partial(fail, WorkerDiedError("no memory")),
        "policy": lambda: Started(ended, "policy"),
        "teacher": partial(fail, ConfigError("no such model")),
    }

    def run() -> int:
        with ExitStack() as resources:
            start_together(starts, resources)
        return 0

    assert exit_status(run) == WorkerDiedError.exit_status
    assert capsys.readouterr().err.splitlines() == [
        *("", "WorkerDiedError: no memory", "This kept 'engines' from starting."),
        "'teacher' did not start either: ConfigError: no such model",
        "Causes of such errors, and what to do: docs/start/troubleshooting.md",
    ]
    assert ended == ["policy"]


def test_what_has_started_ends_when_another_part_fails_to_start() -> None:
    ended: list[str] = []

    def fail() -> Started:
        raise ValueError("no engine")

    starts = {"engines": fail, "teacher": lambda: Started(ended, "teacher"), "policy": lambda: Started(ended, "policy")}
    with pytest.raises(ValueError, match="no engine"), ExitStack() as resources:
        start_together(starts, resources)
    assert ended == ["policy", "teacher"]


def test_one_part_that_fails_to_end_does_not_keep_the_others(tmp_path: Path) -> None:
    ended: list[str] = []
    run = make_run(tmp_path, 1, [])
    start_together({name: partial(Started, ended, name, name == "b") for name in "abc"}, run.resources)
    with pytest.raises(RuntimeError, match="b does not end"), run:
        pass
    assert ended == ["c", "b", "a"]
