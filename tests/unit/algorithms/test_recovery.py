"""A run whose ranks die or hang: what is replaced, what is trained again, and when the run gives up."""

import json
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.runtime.device_sharing import MemorySharing
from nemo_rl.algorithms.runtime.recovery import Cause, Connection, Recovery
from nemo_rl.algorithms.runtime.run import Phase, Run, StepBatch, train_with_restarts
from nemo_rl.algorithms.runtime.session import Cadence, Session, SessionParts
from nemo_rl.algorithms.runtime.validations import InTurn
from nemo_rl.config import CheckpointingConfig, LoggerConfig
from nemo_rl.data.streams.prompt_stream import PromptPosition
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.files.safe_load import load_plain
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.errors import DeadlineExceededError, RunRestartError, WorkerDiedError
from nemo_rl.utils.logger import Logger

pytestmark = pytest.mark.fast


class Model:
    """A model with one weight, which depends on all rows that it was trained on, and whose ranks can be lost."""

    def __init__(self) -> None:
        self.weight = 0.0
        self.loss: str | None = None
        self.asked: list[bool] = []
        self.failures: dict[int, list[Exception]] = {}
        self.loses_ranks = True

    def train(self, data: Any, loss_fn: Any, gbs: int | None = None) -> dict[str, Any]:
        row = data["row"][0]
        for failure in self.failures.get(row, [])[:1]:
            self.failures[row].remove(failure)
            self.weight = float("nan")
            self.loss = "a rank is gone" if self.loses_ranks else None
            raise failure
        self.weight = self.weight / 2 + row
        return {"metrics": {"loss": self.weight, "global_valid_toks": 2.0}}

    def find_loss(self, *, silence_is_loss: bool) -> str | None:
        self.asked.append(silence_is_loss)
        return self.loss

    def save_checkpoint(self, weights: str, optimizer: str | None, tokenizer: str | None, consolidated: bool) -> None:
        Path(weights).mkdir(parents=True)
        torch.save({"weight": self.weight}, Path(weights) / "weight.pt")

    def load(self, folder: Path | None) -> None:
        self.weight = load_plain(folder / "policy/weights/weight.pt")["weight"] if folder else 0.0
        self.loss = None


class Rows:
    """Rows 1, 2, 3 ...; the number of rows that were acknowledged is the position."""

    epoch = 0
    was_changed = False

    def __init__(self) -> None:
        self.done = self.drawn = 0

    def next_batch(self, step: int, phase: Phase) -> StepBatch:
        self.drawn += 1
        return StepBatch(BatchedDataDict({"row": [self.drawn]}), num_prompts=1, prompts=[PromptPosition(0, self.drawn)])

    def trained(self, step: int, batch: StepBatch) -> None:
        self.done = self.drawn

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = self.drawn = state["done"]


@dataclass
class Parts:
    """A run of eight steps with its model, and what its recovery did."""

    folder: Path
    max_restarts: int = 3
    save_period: int = 2
    model: Model = field(default_factory=Model)
    events: list[str] = field(default_factory=list)
    validated: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = CheckpointingConfig.build(
            checkpoint_dir=str(self.folder / "checkpoints"), save_period=self.save_period
        )
        self.checkpoints = CheckpointManager(config)
        self.config = config
        self.logger = Logger(LoggerConfig.build(log_dir=str(self.folder)), self.folder / "exp")
        first = self.rebuild(None)
        self.recovery = Recovery(self.max_restarts, self, self.logger, first)
        self.run = Run(
            session=first.session,
            source=first.source,
            stages=[],
            roles={"policy": self.model},  # type: ignore[dict-item]
            loss_fn=None,  # type: ignore[arg-type]
            memory=first.memory,
            resources=ExitStack(),
            recover=self.recovery,
        )

    @property
    def models(self) -> dict[str, Model]:
        return {"policy": self.model}

    def newest_checkpoint(self) -> Path | None:
        return self.checkpoints.find_resumable()

    def replace_ranks(self, lost: Collection[str], resume_path: Path | None) -> None:
        self.events.append(f"{sorted(lost)} from {resume_path.name if resume_path else 'the start'}")
        self.model.load(resume_path)

    def rebuild(self, resume_path: Path | None) -> Connection:
        rows = Rows()
        parts = SessionParts(
            cadence=Cadence(8, val_period=2, save_period=self.save_period),
            logger=self.logger,
            checkpointing=self.config,
            checkpoints=self.checkpoints,
            models={"policy": self.model},
            source=rows,
            validation=InTurn(self.validate),
            run_config=self.config,
            throughput=SimpleNamespace(begin_step=list, of_step=lambda metrics, timings: {}),  # type: ignore[arg-type]
        )
        return Connection(Session(parts, resume_path, 0.0), rows, [], MemorySharing())

    def validate(self, step: int) -> dict[str, float]:
        self.validated.append(step)
        return {"accuracy": self.model.weight}

    def rows_logged(self, *prefixes: str) -> list[tuple[str, int, dict[str, float]]]:
        """The lines of the metrics file with one of the prefixes, in its order."""
        lines = (json.loads(line) for line in (self.folder / "exp/metrics.jsonl").read_text().splitlines())
        return [(line["prefix"], line["step"], line["metrics"]) for line in lines if line["prefix"] in prefixes]


@pytest.fixture
def undisturbed(tmp_path: Path) -> list[tuple[str, int, dict[str, float]]]:
    parts = Parts(tmp_path / "undisturbed")
    train_with_restarts(parts.run)
    assert parts.events == []
    rows = parts.rows_logged("train", "validation")
    assert [step for prefix, step, _ in rows if prefix == "train"] == list(range(1, 9))
    assert all("num_run_restarts" not in metrics for _, _, metrics in parts.rows_logged("performance"))
    return rows


def died(reason: str = "Worker lm_policy-0-1 (rank 1, node 127.0.0.1, pid 12) died during 'policy train'.") -> Any:
    return WorkerDiedError(f"{reason}\nLast lines of a log")


@pytest.mark.parametrize(("row", "place", "again"), [(6, "step_4", [5]), (5, "step_4", []), (2, "the start", [1])])
def test_a_run_whose_rank_died_logs_the_metrics_of_an_undisturbed_run(
    tmp_path: Path, undisturbed: Any, row: int, place: str, again: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    parts = Parts(tmp_path / "faulted")
    parts.model.failures = {row: [died()]}
    train_with_restarts(parts.run)
    assert parts.events == [f"['policy'] from {place}"]
    assert sorted(parts.rows_logged("train", "validation"), key=str) == sorted(undisturbed, key=str)
    counted = {step for _, step, metrics in parts.rows_logged("performance") if metrics.get("num_run_restarts") == 1.0}
    assert counted == set(range(row, 9))
    source = f"{tmp_path}/faulted/checkpoints/{place}" if place != "the start" else "the initial weights"
    assert f"Restart 1 of 3: the ranks of policy are replaced and continue from {source}; engines" in caplog.text
    assert "Last lines of a log" in caplog.text
    assert ("are trained again" in caplog.text) == bool(again)
    assert parts.checkpoints.steps()[-1] == 8


def test_a_rank_that_hung_until_a_deadline_is_replaced(tmp_path: Path, undisturbed: Any) -> None:
    parts = Parts(tmp_path / "hung")
    parts.model.failures = {4: [DeadlineExceededError("'policy train' did not finish within 2 s")], 7: [died()]}
    train_with_restarts(parts.run)
    assert parts.model.asked == [True, False], "who is too busy to answer is lost only after a deadline"
    assert sorted(parts.rows_logged("train", "validation"), key=str) == sorted(undisturbed, key=str)


def test_a_failure_without_a_lost_rank_ends_the_run_unchanged(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.model.loses_ranks = False
    failure = ValueError("a mistake in a loss")
    parts.model.failures = {3: [failure]}
    with pytest.raises(ValueError, match="a mistake in a loss") as raised:
        train_with_restarts(parts.run)
    assert raised.value is failure
    assert parts.events == []


def test_without_restarts_the_ranks_are_not_even_asked(tmp_path: Path) -> None:
    parts = Parts(tmp_path, max_restarts=0)
    parts.model.failures = {3: [died()]}
    with pytest.raises(WorkerDiedError):
        train_with_restarts(parts.run)
    assert parts.model.asked == []


def test_a_step_that_fails_twice_in_the_same_way_ends_the_run(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.model.failures = {5: [died(), died(f"{died()}".partition("\n")[0].replace("pid 12", "pid 99"))]}
    with pytest.raises(RunRestartError, match="Step 5 failed twice in the same way") as raised:
        train_with_restarts(parts.run)
    listed = str(raised.value).splitlines()[1:]
    assert [line.split(":")[0] for line in listed] == ["  step 5", "  step 5"]
    assert ("pid 12" in listed[0], "pid 99" in listed[1]) == (True, True)


def test_a_step_may_fail_in_two_ways(tmp_path: Path, undisturbed: Any) -> None:
    parts = Parts(tmp_path / "faulted")
    parts.model.failures = {5: [died(), DeadlineExceededError("'policy train' did not finish within 2 s")]}
    train_with_restarts(parts.run)
    assert sorted(parts.rows_logged("train", "validation"), key=str) == sorted(undisturbed, key=str)
    assert parts.rows_logged("performance")[-1][2]["num_run_restarts"] == 2.0


def test_a_run_gives_up_when_its_restarts_are_used_up(tmp_path: Path) -> None:
    parts = Parts(tmp_path, max_restarts=2)
    parts.model.failures = {row: [died()] for row in (3, 4, 5, 6)}
    with pytest.raises(RunRestartError, match="max_run_restarts=2 restarts are used up") as raised:
        train_with_restarts(parts.run)
    assert [line.split(":")[0].strip() for line in str(raised.value).splitlines()[1:]] == ["step 3", "step 4", "step 5"]


def test_a_run_that_a_signal_ends_does_not_restart(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.model.failures = {3: [died()]}
    parts.run.session._signals = SimpleNamespace(received=15, start=lambda: None, stop=lambda: None)  # type: ignore[assignment]
    parts.run.session._has_to_stop = lambda: False  # type: ignore[method-assign]
    with pytest.raises(WorkerDiedError):
        train_with_restarts(parts.run)


def test_a_source_that_the_program_has_replaced_is_not_built_again(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.model.failures = {3: [died()]}
    parts.run.source = Rows()
    with pytest.raises(RunRestartError, match="its source was replaced after setup"):
        train_with_restarts(parts.run)


def test_the_limit_of_time_counts_from_the_start_of_the_run(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.model.failures = {3: [died()]}
    deadline = SimpleNamespace(start_iterations=lambda: None, mark_iteration=lambda: None, check_save=lambda: False)
    parts.run.session._deadline = deadline  # type: ignore[assignment]
    train_with_restarts(parts.run)
    assert parts.run.session._deadline is deadline


def test_causes_are_compared_without_processes_and_nodes() -> None:
    causes = [Cause(3, f"WorkerDiedError: Node 10.0.0.{n} (id {n:032x}) is lost, pid {n}") for n in (1, 1, 2)]
    assert causes[0].kind == causes[1].kind != causes[2].kind
    assert Cause(3, "pid 5 died").kind == Cause(3, "pid 6 died").kind != Cause(4, "pid 6 died").kind
