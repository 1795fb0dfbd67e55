"""Streams of several data sets: shares, epochs, and positions that are exactly what was not trained on."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from numbered_prompts import collate, make_stream

from nemo_rl.config import CurriculumConfig, load_config
from nemo_rl.data.datasets.processed_dataset import MixedDataset
from nemo_rl.data.streams.curriculum import Curriculum
from nemo_rl.data.streams.mixed_stream import MixedPromptStream, training_stream
from nemo_rl.data.streams.prompt_stream import DataExhausted, PromptPosition
from nemo_rl.files.safe_load import load_plain
from nemo_rl.utils.errors import DataError

pytestmark = pytest.mark.fast

SIZES = {"big": 40, "small": 6, "tiny": 1}
WEIGHTS = {"big": 2.0, "small": 1.0, "tiny": 0.5}
RISING = {
    "phases": [
        {"from_step": 0, "weights": {"big": 1, "small": 0, "tiny": 0}},
        {"from_step": 12, "weights": {"big": 1, "small": 3, "tiny": 1}},
    ],
    "interpolation": "linear",
}
BY_ACCURACY = {"accuracy": {"average_over": 4, "min_share": 0.1}}


class Numbers:
    """Rows of a data set: dicts in place of prompts, to which `MixedDataset` adds their number."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int) -> Any:
        return {}

    def place(self, idx: int) -> tuple[str, int]:
        return "numbers", idx


def make_mixed(
    sizes: dict[str, int] = SIZES, curriculum: dict[str, Any] | None = None, **options: Any
) -> MixedPromptStream:
    dataset = MixedDataset([Numbers(size) for size in sizes.values()], list(sizes))
    weights = {name: WEIGHTS.get(name, 1.0) for name in sizes}
    config = None if curriculum is None else CurriculumConfig.build(**curriculum)
    options = {"batch_size": 7, "shuffle": True, "seed": 5, "max_epochs": 3} | options
    return MixedPromptStream(
        dataset,
        options.pop("batch_size"),
        Curriculum(weights, config),
        collate_fn=lambda rows: collate([row["idx"] for row in rows]),
        **options,
    )


def name_of(row: int) -> str:
    return "big" if row < 40 else "small" if row < 46 else "tiny"


def reward_of(position: PromptPosition, step: int) -> list[float]:
    """Rewards that depend on the prompt and the step, as those of a policy that learns do."""
    chance = random.Random(hash((position.epoch, position.row, step)))
    return [float(chance.random() < step / 30) for _ in range(4)]


def steps_of(stream: MixedPromptStream, first: int, last: int) -> list[list[PromptPosition]]:
    """Train in step: draw a batch, acknowledge it, finish the step."""
    found = []
    for step in range(first, last + 1):
        batch = stream.next_batch()
        assert batch.rows["idx"] == [position.row for position in batch.positions]
        found.append(batch.positions)
        stream.acknowledge(reversed(batch.positions))
        stream.finish_step(step, {position: reward_of(position, step) for position in batch.positions})
    return found


def stored(stream: MixedPromptStream, folder: Path) -> dict[str, Any]:
    torch.save(stream.state_dict(), folder / "position.pt")
    return load_plain(folder / "position.pt")


def resumed(stream: MixedPromptStream, folder: Path, **options: Any) -> MixedPromptStream:
    fresh = make_mixed(**options)
    fresh.load_state_dict(stored(stream, folder))
    return fresh


def test_over_1000_steps_shares_are_the_weights_within_one_prompt() -> None:
    stream = make_mixed(max_epochs=10_000)
    counts = Counter(name_of(position.row) for batch in steps_of(stream, 1, 1000) for position in batch)
    for name, weight in WEIGHTS.items():
        assert abs(counts[name] - 7000 * weight / 3.5) < 1


def test_data_sets_without_weights_start_with_equal_shares() -> None:
    entries = "data.train=[{name: big, dataset_name: arithmetic}, {name: small, dataset_name: arithmetic}]"
    config = load_config("examples/configs/grpo_math_cpu.yaml", [entries, "data.curriculum.accuracy={}"])
    rows = MixedDataset([Numbers(40), Numbers(40)], ["big", "small"])
    stream = training_stream(config, rows, 8, collate_fn=lambda found: collate([row["idx"] for row in found]))
    assert isinstance(stream, MixedPromptStream)
    batch = stream.next_batch()
    assert sum(position.row < 40 for position in batch.positions) == 4


def test_each_epoch_of_a_data_set_has_each_row_once_in_its_own_order() -> None:
    stream = make_mixed(max_epochs=20)
    drawn = [position for batch in steps_of(stream, 1, 120) for position in batch]
    orders: dict[tuple[str, int], list[int]] = defaultdict(list)
    for position in drawn:
        orders[name_of(position.row), position.epoch].append(position.row)
    rows = {"big": [*range(40)], "small": [*range(40, 46)], "tiny": [46]}
    last = {name: max(epoch for other, epoch in orders if other == name) for name in rows}
    assert last["big"] == 11 and last["small"] > 30
    for (name, epoch), order in orders.items():
        assert sorted(order) == rows[name] if epoch < last[name] else len(set(order)) == len(order)
    assert orders["big", 0] != orders["big", 1]
    metrics = stream.metrics(dict.fromkeys(drawn[-7:], ()))
    assert metrics["epochs/big"] == 120 * 4 / 40
    assert metrics["share/big"] == 4 / 7
    assert metrics["target_share/tiny"] == pytest.approx(1 / 7)


def test_the_order_of_a_data_set_does_not_depend_on_the_others() -> None:
    order = [p.row for batch in steps_of(make_mixed(), 1, 18) for p in batch if p.row < 40]
    alone = [p.row for batch in steps_of(make_mixed({"big": 40, "other": 40}), 1, 30) for p in batch if p.row < 40]
    assert order[:60] == alone[:60]


def test_without_shuffle_rows_keep_their_order() -> None:
    drawn = [p for batch in steps_of(make_mixed(shuffle=False), 1, 14) for p in batch]
    assert [p.row for p in drawn if p.row < 40] == [*range(40), *range(16)]
    assert [p.row for p in drawn if 40 <= p.row < 46][:12] == [*range(40, 46)] * 2


def test_the_run_ends_after_its_epochs_of_all_data_sets() -> None:
    stream = make_mixed(max_epochs=2)
    assert stream.batches_per_epoch == 47 // 7
    steps_of(stream, 1, 6)
    assert stream.epoch == 1
    steps_of(stream, 7, 12)
    with pytest.raises(DataExhausted, match=r"ended after 2 epochs \(max_num_epochs=2\)"):
        stream.next_batch()


@pytest.mark.parametrize("curriculum", [None, RISING, BY_ACCURACY, RISING | BY_ACCURACY])
@pytest.mark.parametrize("seed", range(5))
def test_a_killed_run_repeats_the_prompts_of_one_that_was_not(
    curriculum: dict[str, Any] | None, seed: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    expected = steps_of(make_mixed(curriculum=curriculum, max_epochs=5), 1, 30)
    stream, saved, step, found = make_mixed(curriculum=curriculum, max_epochs=5), None, 0, {}
    num_kills = 0
    while step < 30:
        step += 1
        found[step] = steps_of(stream, step, step)[0]
        if chance.random() < 0.3:
            saved = step, stored(stream, tmp_path)
        elif chance.random() < 0.3:
            num_kills += 1
            if chance.random() < 0.5:
                stream.next_batch()  # of a step that is not finished
            stream = make_mixed(curriculum=curriculum, max_epochs=5)
            step = 0 if saved is None else saved[0]
            if saved is not None:
                stream.load_state_dict(saved[1])
    assert num_kills > 2
    assert list(found.values()) == expected


@pytest.mark.parametrize("curriculum", [None, RISING, BY_ACCURACY])
@pytest.mark.parametrize("seed", range(10))
def test_in_any_order_every_drawn_prompt_is_trained_on_once(
    curriculum: dict[str, Any] | None, seed: int, tmp_path: Path
) -> None:
    """Prompts are drawn ahead and acknowledged one by one in random order; the run stops and resumes at random."""
    chance = random.Random(seed)
    options: dict[str, Any] = {"curriculum": curriculum, "batch_size": chance.randrange(1, 9), "seed": seed}
    stream = make_mixed(**options)
    in_flight: list[PromptPosition] = []
    trained: list[PromptPosition] = []
    num_batches = 3 * stream.batches_per_epoch
    num_resumes = step = 0
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
            if chance.random() < 0.2:
                step += 1
                stream.finish_step(step, {position: reward_of(position, step)})
        elif action >= 0.93:
            num_resumes += 1
            stream, in_flight = resumed(stream, tmp_path, **options), []
    assert len(trained) == num_batches * options["batch_size"] == len(set(trained))
    assert num_resumes > 0
    assert "outstanding" not in stream.state_dict()
    for name, rows in {"big": range(40), "small": range(40, 46), "tiny": range(46, 47)}.items():
        own = sorted(position for position in trained if position.row in rows)
        whole = [PromptPosition(epoch, row) for epoch in range(own[-1].epoch) for row in rows] if own else []
        assert own[: len(whole)] == whole, name


def test_groups_that_a_part_restores_are_claimed_and_the_other_prompts_come_first(tmp_path: Path) -> None:
    stream = make_mixed()
    first, second = stream.next_batch().positions, stream.next_batch().positions
    stream.acknowledge([second[1], first[2]])
    stream.finish_step(1, {})

    class Kept:
        def state_dict(self) -> dict[str, Any]:
            return {"groups": [list(first[0]), list(second[3])]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            fresh.claim(PromptPosition(*each) for each in state["groups"])

    stream.attach("kept", Kept())
    fresh = make_mixed()
    fresh.attach("kept", Kept())
    fresh.load_state_dict(stored(stream, tmp_path))
    claimed = [first[0], second[3]]
    left = [p for p in (*first, *second) if p not in (second[1], first[2], *claimed)]
    again = fresh.next_batch().positions + fresh.next_batch().positions
    assert again[: len(left)] == left
    assert again[len(left) :] == stream.next_batch().positions[: 14 - len(left)]
    assert fresh.prepare(claimed).rows["idx"] == [p.row for p in claimed]
    fresh.acknowledge(claimed)
    with pytest.raises(
        DataError, match=rf"Row {first[0].row} of epoch 0 was claimed, but the checkpoint has not drawn"
    ):
        fresh.claim([first[0]])


def test_a_prompt_is_acknowledged_once_and_only_after_it_was_handed_out(tmp_path: Path) -> None:
    stream = make_mixed()
    first = stream.next_batch().positions
    fresh = resumed(stream, tmp_path)
    stream.acknowledge(first)
    for wrong in (first[0], PromptPosition(7, 0)):
        with pytest.raises(ValueError, match=f"Row {wrong.row} of epoch {wrong.epoch} was acknowledged, but"):
            stream.acknowledge([wrong])
    with pytest.raises(ValueError, match="never handed out"):
        fresh.acknowledge([first[0]])


def other(**changes: Any) -> Callable[[], MixedPromptStream]:
    return lambda: make_mixed(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other(seed=6), "seed was 5 and is 6"),
        (other(batch_size=6), "batch_size was 7 and is 6"),
        (other(sizes=SIZES | {"small": 7}), r"rows by data set was \{.*'small': 6.*\} and is \{.*'small': 7"),
        (other(sizes=SIZES | {"new": 7}), "and is .*'new': 7"),
    ],
)
def test_a_position_in_other_data_is_refused(make: Callable[[], MixedPromptStream], message: str) -> None:
    stream = make_mixed()
    stream.next_batch()
    with pytest.raises(DataError, match=message):
        make().load_state_dict(stream.state_dict())


def test_accepted_changes_continue_each_data_set_by_its_name() -> None:
    stream = make_mixed(shuffle=False)
    drawn = [p for batch in steps_of(stream, 1, 3) for p in batch]
    last = stream.next_batch().positions
    sizes = {"new": 3, "big": 41, "tiny": 1}  # small is gone, and big has another place and one more row
    fresh = make_mixed(sizes, shuffle=False, accept_changes=True)
    fresh.load_state_dict(stream.state_dict())
    again = [p for _ in range(2) for p in fresh.next_batch().positions]
    in_big = [p.row for p in last if p.row < 40]
    kept = [3 + row for row in in_big] + [44 for p in last if p.row == 46]
    assert sorted(p.row for p in again[: len(kept)]) == sorted(kept)
    big = [p.row - 3 for p in again if 3 <= p.row < 44]
    assert big == [*range(sum(p.row < 40 for p in drawn), big[-1] + 1)]
    assert [p.row for p in again if p.row < 3][:3] == [0, 1, 2]


def test_weights_can_neither_be_added_nor_removed_in_the_middle_of_a_run() -> None:
    mixed, plain = make_mixed(accept_changes=True), make_stream(num_rows=47, accept_changes=True)
    with pytest.raises(DataError, match="is in data sets that are shuffled together; this run draws them by weights"):
        mixed.check_position(plain.state_dict())
    with pytest.raises(DataError, match="is in data sets that are drawn by weights; this run shuffles them together"):
        plain.check_position(mixed.state_dict())


def test_fewer_rows_than_a_batch_are_refused() -> None:
    with pytest.raises(DataError, match="have 3 rows together, fewer than one batch of 7 prompts"):
        make_mixed({"big": 2, "small": 1})
