"""Positions in the data: what is stored is exactly what was not trained on, in whatever order it was."""

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from numbered_prompts import Rows, make_loader, make_stream

from nemo_rl.data.loader import PromptLoader
from nemo_rl.data.streams.prompt_stream import DataExhausted, PromptPosition, PromptStream
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.files.safe_load import load_plain
from nemo_rl.utils.errors import DataError

pytestmark = pytest.mark.fast


def drained(stream: PromptStream) -> list[PromptPosition]:
    """All prompts that a stream still hands out; each batch is what its positions say."""
    found: list[PromptPosition] = []
    while True:
        try:
            batch = stream.next_batch()
        except DataExhausted:
            return found
        assert batch.rows["idx"] == [position.row for position in batch.positions]
        found += batch.positions


def resumed(stream: PromptStream, folder: Path, **options: Any) -> PromptStream:
    """A fresh stream at the stored position of another one, by way of a file."""
    torch.save(stream.state_dict(), folder / "position.pt")
    fresh = make_stream(**options)
    fresh.load_state_dict(load_plain(folder / "position.pt"))
    return fresh


def test_positions_name_the_rows_of_each_epoch() -> None:
    found = drained(make_stream())
    assert [position.epoch for position in found] == [0] * 12 + [1] * 12
    orders = [[position.row for position in found[start : start + 12]] for start in (0, 12)]
    assert orders[0] != orders[1]
    assert [sorted(order) for order in orders] == [list(range(12))] * 2


def test_a_run_in_step_stores_the_same_position_as_before_positions_were_known() -> None:
    stream = make_stream()
    for _ in range(6):
        stream.acknowledge(stream.next_batch().positions)
    conditions = {"num_rows": 12, "batch_size": 3, "shuffle": True, "seed": 5}
    stored = {"epoch": 1, "loader": {"epoch": 1, "num_batches_done": 2, **conditions}}
    assert stream.state_dict() == stored
    stream.next_batch()
    assert stream.state_dict() == stored
    fresh = make_stream()
    fresh.load_state_dict(stored)
    assert drained(fresh) == drained(make_stream())[18:]


@pytest.mark.parametrize("seed", range(25))
def test_in_any_order_every_prompt_is_trained_on_once_per_epoch(seed: int, tmp_path: Path) -> None:
    """Prompts are drawn ahead and acknowledged one by one in random order; the run stops and resumes at random."""
    chance = random.Random(seed)
    options: dict[str, Any] = {
        "num_rows": chance.randrange(7, 30),
        "batch_size": chance.randrange(1, 6),
        "max_epochs": chance.randrange(1, 4),
        "seed": seed,
    }
    expected = drained(make_stream(**options))
    stream, in_flight, trained = make_stream(**options), [], []
    num_resumes = 0
    while True:
        action = chance.random()
        if action < 0.3:
            try:
                in_flight += stream.next_batch().positions
            except DataExhausted:
                if not in_flight:
                    break
        elif action < 0.9 and in_flight:
            position = in_flight.pop(chance.randrange(len(in_flight)))
            stream.acknowledge([position])
            trained.append(position)
        elif action >= 0.93:
            num_resumes += 1
            stream, in_flight = resumed(stream, tmp_path, **options), []
        assert len(stream.state_dict().get("outstanding", ())) <= len(expected) - len(trained)
    assert sorted(trained) == sorted(expected)
    assert num_resumes > 0 or len(expected) < 30
    assert "outstanding" not in stream.state_dict()


def test_prompts_that_were_not_trained_on_come_first_and_batches_stay_full(tmp_path: Path) -> None:
    stream = make_stream()
    first, second = stream.next_batch().positions, stream.next_batch().positions
    stream.acknowledge([second[1], first[2]])
    fresh = resumed(stream, tmp_path)
    again = fresh.next_batch(), fresh.next_batch()
    left = [first[0], first[1], second[0], second[2]]
    assert again[0].positions + again[1].positions[:1] == left
    assert [len(batch.positions) for batch in again] == [3, 3]
    fresh.acknowledge(again[0].positions)
    assert fresh.state_dict()["outstanding"] == [list(second[2])]


@pytest.mark.parametrize("num_left", [1, 2, 3, 4, 7])
def test_prompts_after_a_resume_are_prepared_once(num_left: int) -> None:
    stream = make_stream(num_rows=14)
    drawn = [position for _ in range(3) for position in stream.next_batch().positions]
    stream.acknowledge(drawn[num_left:])
    stream.acknowledge(stream.next_batch().positions)
    rows = Rows(14)
    fresh = PromptStream(make_loader(rows), max_epochs=2)
    fresh.load_state_dict(stream.state_dict())
    found = drained(fresh)
    assert found[:num_left] == drawn[:num_left]
    assert rows.prepared == Counter(position.row for position in found)
    assert [position.epoch for position in found] == [0] * num_left + [1] * 12, "two of 14 rows fill no batch"


def test_workers_prepare_all_but_one_batch_of_a_pass_after_a_resume() -> None:
    stream = make_stream()
    stream.acknowledge(stream.next_batch().positions[1:])
    fresh = make_stream(max_epochs=4, num_workers=1)
    fresh.load_state_dict(stream.state_dict())
    batches = [fresh.next_batch() for _ in range(15)]
    assert sorted(position.row for batch in batches for position in batch.positions if position.epoch == 1) == [
        *range(12)
    ]
    here = [batch.rows["process"] == os.getpid() for batch in batches]
    assert here == [True, False, False, *[True, False, False, False] * 3]


def test_a_prompt_is_acknowledged_once() -> None:
    stream = make_stream()
    first = stream.next_batch().positions
    stream.acknowledge(first)
    for wrong in (first[0], PromptPosition(1, 0)):
        with pytest.raises(ValueError, match=f"Row {wrong.row} of epoch {wrong.epoch} was acknowledged, but"):
            stream.acknowledge([wrong])


class Kept:
    """Groups that were sampled for prompts, and belong to them."""

    def __init__(self, stream: PromptStream):
        self.stream = stream
        self.prompts: list[PromptPosition] = []
        stream.attach("kept", self)

    def state_dict(self) -> dict[str, Any]:
        return {"prompts": [list(prompt) for prompt in self.prompts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.prompts = [PromptPosition(*prompt) for prompt in state["prompts"]]
        self.stream.claim(self.prompts)


def test_prompts_of_restored_groups_are_not_handed_out_again_until_the_part_is_gone(tmp_path: Path) -> None:
    stream = make_stream()
    kept = Kept(stream)
    first, second, third = (stream.next_batch().positions for _ in range(3))
    stream.acknowledge(first[:2])
    kept.prompts = [first[2], second[1], third[0]]
    torch.save(stream.state_dict(), tmp_path / "position.pt")
    everything = drained(make_stream())

    with_part = make_stream()
    restored = Kept(with_part)
    with_part.load_state_dict(load_plain(tmp_path / "position.pt"))
    assert restored.prompts == kept.prompts
    rest = drained(with_part)
    assert sorted(rest) == sorted(set(everything) - set(first) - set(kept.prompts))
    with_part.acknowledge([*restored.prompts, *rest])
    assert "outstanding" not in with_part.state_dict()

    without = make_stream()
    without.load_state_dict(load_plain(tmp_path / "position.pt"))
    assert sorted(drained(without)) == sorted(set(everything) - set(first[:2]))


def test_a_prompt_is_claimed_once_and_only_if_it_is_to_come() -> None:
    stream = make_stream()
    done = stream.next_batch().positions
    stream.acknowledge(done[:1])
    fresh = make_stream()
    fresh.load_state_dict(stream.state_dict())
    fresh.claim(done[1:2])
    for wrong in (done[0], done[1]):
        with pytest.raises(ValueError, match="was acknowledged or claimed before"):
            fresh.claim([wrong])


def test_a_prompt_of_a_pass_that_the_run_no_longer_has_cannot_be_claimed() -> None:
    fresh = make_stream(max_epochs=1)
    with pytest.raises(DataExhausted, match="row 3 of epoch 1 was claimed, but the training data ends after 1 pass"):
        fresh.claim([PromptPosition(1, 3)])


def store_with_groups_ahead(folder: Path, shuffle: bool) -> list[PromptPosition]:
    """Store the position after three batches that were trained on, and groups of the fourth; return their prompts."""
    stream = make_stream(shuffle=shuffle)
    kept = Kept(stream)
    for _ in range(3):
        stream.acknowledge(stream.next_batch().positions)
    kept.prompts = stream.next_batch().positions
    torch.save(stream.state_dict(), folder / "position.pt")
    return kept.prompts


def load_into_changed_data(folder: Path, **options: Any) -> tuple[PromptStream, Kept]:
    fresh = make_stream(accept_changes=True, **options)
    kept = Kept(fresh)
    fresh.load_state_dict(load_plain(folder / "position.pt"))
    return fresh, kept


def test_groups_fit_data_to_which_rows_were_added_at_the_end(tmp_path: Path) -> None:
    prompts = store_with_groups_ahead(tmp_path, shuffle=False)
    fresh, kept = load_into_changed_data(tmp_path, num_rows=20, shuffle=False, max_epochs=1)
    assert kept.prompts == prompts == [PromptPosition(0, row) for row in (9, 10, 11)]
    assert [position.row for position in drained(fresh)] == [12, 13, 14, 15, 16, 17]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_rows": 5, "shuffle": False}, "num_rows was 12 and is 5"),
        ({"num_rows": 13}, "num_rows was 12 and is 13"),
        ({"seed": 9}, "seed was 5 and is 9"),
    ],
)
def test_groups_whose_prompts_changed_data_does_not_give_again_are_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    store_with_groups_ahead(tmp_path, change.get("shuffle", True))
    message = rf"responses to row \d+ of epoch 0, which .* because the data changed .{said}.* Resume with"
    with pytest.raises(DataError, match=message):
        load_into_changed_data(tmp_path, **change)


def test_outstanding_rows_that_changed_data_lacks_are_left_out(tmp_path: Path) -> None:
    stream = make_stream()
    positions = stream.next_batch().positions
    stream.acknowledge(positions[:1])
    fresh = make_stream(num_rows=4, batch_size=2, accept_changes=True)
    fresh.load_state_dict(stream.state_dict())
    assert all(position.row < 4 for position in drained(fresh))


class RowsWithOneFault(Rows):
    """Row 0 cannot be used."""

    def place(self, row: int) -> tuple[str, int]:
        return "rows.jsonl", row + 1

    @staticmethod
    def collate(rows: list[int]) -> BatchedDataDict[Any]:
        faults = ["broken" if row == 0 else None for row in rows]
        weights = torch.tensor([float(fault is None) for fault in faults])
        return BatchedDataDict({"idx": rows, "loss_multiplier": weights, "fault": faults})


@pytest.mark.parametrize(("num_acknowledged", "num_reported"), [(1, 1), (2, 1), (0, 2)])
def test_a_row_that_is_handed_out_again_counts_once_as_unusable(num_acknowledged: int, num_reported: int) -> None:
    """The process that stored a prompt as not trained on has counted it; one that loads it counts the other prompts."""

    def make() -> tuple[PromptLoader, PromptStream]:
        loader = make_loader(RowsWithOneFault(12), 4, shuffle=False, collate_fn=RowsWithOneFault.collate)
        return loader, PromptStream(loader, max_epochs=2)

    _, stream = make()
    first = stream.next_batch()
    stream.acknowledge(first.positions[4 - num_acknowledged :])
    loader, fresh = make()
    fresh.load_state_dict(stream.state_dict())
    found = drained(fresh)
    left = range(4 - num_acknowledged)
    assert sorted(position.row for position in found if position.epoch == 0) == [*left, *range(4, 12)]
    assert loader.num_unusable == num_reported
