"""The loader continues exactly where a saved state stopped."""

import logging
import os
import pickle
import subprocess
import sys

import pytest
import torch
from data_helpers import data_config, write_lines

from nemo_rl.data.datasets import setup_response_data
from nemo_rl.data.loader import build_loader
from nemo_rl.utils.errors import DataError

NUM_ROWS, BATCH = 23, 4


@pytest.fixture
def dataset(bare_tokenizer):
    train = {"dataset_name": "arithmetic", "num_samples": NUM_ROWS}
    return setup_response_data(bare_tokenizer, data_config(train=train), ["math"]).train


def make(dataset, num_workers=0, **keys):
    keys = {"shuffle": True, "seed": 7, "drop_last": True} | keys
    return build_loader(dataset, BATCH, num_workers=num_workers, **keys)


def look(batch):
    tokens = [message_log[0]["token_ids"].tolist() for message_log in batch["message_log"]]
    return batch["idx"], tokens


def epochs(loader, count):
    return [[look(batch) for batch in loader] for _ in range(count)]


def test_epochs_differ_cover_every_row_and_are_deterministic(dataset):
    first, second = epochs(make(dataset, drop_last=False), 2)
    assert [len(idx) for idx, _ in first] == [4, 4, 4, 4, 4, 3]
    for epoch in (first, second):
        assert sorted(i for idx, _ in epoch for i in idx) == list(range(NUM_ROWS))
    assert first != second
    assert epochs(make(dataset, drop_last=False), 2) == [first, second]
    assert epochs(make(dataset, drop_last=False, seed=8), 1) != [first]
    assert len(epochs(make(dataset), 1)[0]) == len(make(dataset)) == 5


def test_unshuffled_rows_keep_their_order(dataset):
    (epoch,) = epochs(make(dataset, shuffle=False), 1)
    assert [i for idx, _ in epoch for i in idx] == list(range(20))


@pytest.mark.parametrize(("workers_before", "workers_after"), [(0, 0), (2, 2), (0, 1), (1, 0)])
@pytest.mark.parametrize("drop_last", [True, False])
def test_the_loader_resumes_at_every_position(dataset, workers_before, workers_after, drop_last):
    whole = epochs(make(dataset, drop_last=drop_last), 3)
    positions = [(1, 2), (1, len(whole[1]))] if workers_before + workers_after else None
    positions = positions or [(e, n) for e in (0, 1) for n in range(1, len(whole[0]) + 1)]
    for epoch, num_seen in positions:
        loader = make(dataset, workers_before, drop_last=drop_last)
        epochs(loader, epoch)
        batches = iter(loader)
        seen = [look(next(batches)) for _ in range(num_seen)]
        assert seen == whole[epoch][:num_seen]
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        torch.manual_seed(epoch)
        resumed = make(dataset, workers_after, drop_last=drop_last)
        resumed.load_state_dict(state)
        assert epochs(resumed, 2) == [whole[epoch][num_seen:], whole[epoch + 1]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_resumes_between_epochs(dataset, num_workers):
    whole = epochs(make(dataset), 3)
    for done in (0, 1, 2):
        loader = make(dataset, num_workers)
        epochs(loader, done)
        resumed = make(dataset, num_workers)
        resumed.load_state_dict(loader.state_dict())
        assert epochs(resumed, 3 - done) == whole[done:]


def test_the_loader_resumes_twice(dataset):
    whole = epochs(make(dataset), 2)
    state = None
    got = []
    for _ in range(10):
        loader = make(dataset)
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        batch = next(batches, None) or next(iter(loader))
        got.append(look(batch))
        state = loader.state_dict()
    assert got == whole[0] + whole[1]


def test_state_of_other_data_is_refused(dataset):
    loader = make(dataset)
    next(iter(loader))
    with pytest.raises(DataError, match="seed was 7 and is 8"):
        make(dataset, seed=8).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_position_in_changed_data_keeps_epoch_and_number_of_rows(dataset, caplog, shuffle):
    old = make(dataset, shuffle=shuffle)
    epochs(old, 1)
    batches = iter(old)
    for _ in range(3):
        next(batches)
    shorter = torch.utils.data.Subset(dataset, [i for i in range(NUM_ROWS) if i != 5])
    new = build_loader(shorter, 5, shuffle=shuffle, seed=8, accept_changes=True)
    new.load_state_dict(old.state_dict())
    whole = epochs(build_loader(shorter, 5, shuffle=shuffle, seed=8), 3)
    assert epochs(new, 2) == [whole[1][2:], whole[2]]
    assert "num_rows was 23 and is 22, batch_size was 4 and is 5, seed was 7 and is 8" in caplog.text
    assert "epoch 2 resumes after 10 of its 22 rows" in caplog.text
    assert ("new order" in caplog.text) is shuffle


def test_a_position_after_the_end_of_changed_data_starts_the_next_epoch(dataset):
    old = make(dataset)
    batches = iter(old)
    for _ in range(5):
        next(batches)
    fewer = torch.utils.data.Subset(dataset, list(range(8)))
    new = build_loader(fewer, BATCH, shuffle=True, seed=7, accept_changes=True)
    new.load_state_dict(old.state_dict())
    assert epochs(new, 2) == [[], epochs(build_loader(fewer, BATCH, shuffle=True, seed=7), 2)[1]]


def test_leaving_an_epoch_early_starts_the_next(dataset):
    whole = epochs(make(dataset), 2)
    loader = make(dataset)
    next(iter(loader))
    assert epochs(loader, 1) == [whole[1]]
    unshuffled = make(dataset, shuffle=False)
    assert look(next(iter(unshuffled))) == look(next(iter(unshuffled)))


def test_fewer_rows_than_a_batch_are_refused(dataset):
    with pytest.raises(DataError, match="23 rows, fewer than one batch of 24"):
        build_loader(dataset, 24, shuffle=False, seed=0)
    assert len(build_loader(dataset, 24, shuffle=False, seed=0, drop_last=False)) == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_over_long_prompts_are_reported(bare_tokenizer, tmp_path, caplog, num_workers):
    rows = [{"input": "1" * (30 if i in (2, 5) else 3), "output": "1"} for i in range(8)]
    path = write_lines(tmp_path / "rows.jsonl", *rows)
    config = data_config(train={"data_path": path}, max_input_seq_length=10)
    with caplog.at_level(logging.WARNING):
        train = setup_response_data(bare_tokenizer, config, ["math"]).train
    assert f"2 of the first 8 rows of {path} are longer than data.max_input_seq_length=10 tokens" in caplog.text
    loader = build_loader(train, 4, shuffle=False, seed=0, num_workers=num_workers)
    with caplog.at_level(logging.WARNING):
        batches = list(loader)
    assert torch.cat([batch["loss_multiplier"] for batch in batches]).tolist() == [
        1, 1, 0, 1, 1, 0, 1, 1,
    ]  # fmt: skip
    assert loader.num_over_long == 2
    assert f"{path}:3: longer" in caplog.text and f"{path}:6: longer" in caplog.text
    assert "2 rows of this epoch" in caplog.text


def test_max_rows_limits_the_rows_of_an_epoch(dataset):
    loader = make(dataset, shuffle=False, drop_last=False, max_rows=10)
    assert [batch["idx"] for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


class Groups(torch.utils.data.Dataset):
    """Rows that tell in which process group they were read."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return os.getpgid(0)

    def place(self, index):
        return "here", index


def test_data_workers_are_outside_the_process_group_of_the_terminal():
    loader = build_loader(Groups(), 4, shuffle=False, seed=0, num_workers=1, collate_fn=lambda rows: {"groups": rows})
    (batch,) = loader
    assert os.getpgid(0) not in batch["groups"]


GARBAGE_OF_A_RUN = """
import gc, os, time
from torch.utils.data import Dataset
from nemo_rl.data.loader import build_loader

class Waits:
    def __init__(self):
        self.cycle, self.home = self, os.getpid()
    def __del__(self):
        while os.getpid() != self.home:
            time.sleep(1)

class Rows(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        gc.collect()
        return index

gc.disable()
Waits()
print(list(build_loader(Rows(), 2, shuffle=False, seed=0, num_workers=1, collate_fn=list)))
"""


def test_a_data_worker_does_not_finalize_objects_of_the_run():
    """Finalizers of Ray objects wait for threads that a forked worker does not have."""
    command = [sys.executable, "-W", "ignore", "-c", GARBAGE_OF_A_RUN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[[0, 1], [2, 3]]\n", done.stderr
