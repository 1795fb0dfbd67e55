"""What rows have next to their token ids: checks, collating, positions, and the way through pickle."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from nemo_rl.algorithms.rollout.batches import build_training_batch
from nemo_rl.data.collate_fn import feedback_collate_fn, preference_collate_fn, rl_collate_fn, sft_collate_fn
from nemo_rl.data.messages.conversations import cut_to_stub
from nemo_rl.data.model_rows import RowInput, RowInputs, completed, forward_arguments, position_ids
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.models.batch_rows import BatchRows
from nemo_rl.utils.errors import DataError

pytestmark = pytest.mark.fast

TOKENIZER = SimpleNamespace(pad_token_id=0)


def pixels(count: int, positions=None) -> RowInputs:
    values = torch.arange(count * 2, dtype=torch.float32).view(count, 2)
    return RowInputs({"pixels": RowInput(values, lengths_as="num_pixels")}, positions)


def datum(idx: int = 0, inputs: RowInputs | None = None, **more):
    log = [{"role": "user", "content": "", "token_ids": torch.tensor([7, 8, 9])}]
    log += [{"role": "assistant", "content": "", "token_ids": torch.tensor([4, idx])}]
    own = {} if inputs is None else {"row_inputs": inputs}
    return {"message_log": log, "length": 5, "extra_env_info": None, "loss_multiplier": 1.0, "idx": idx} | own | more


def count_down(token_ids, inputs):
    return torch.arange(len(token_ids)).flip(0)


def two_axes(token_ids, inputs):
    return torch.stack([torch.arange(len(token_ids)), torch.arange(len(token_ids)) * 2])


def test_items_of_all_rows_come_end_to_end_with_their_numbers():
    batch = sft_collate_fn([datum(0, pixels(2)), datum(1), datum(2, pixels(1))], TOKENIZER, 1)
    arguments = forward_arguments(batch["row_inputs"])
    assert arguments["pixels"].tolist() == [[0, 1], [2, 3], [0, 1]]
    assert arguments["num_pixels"].tolist() == [2, 0, 1]
    assert arguments["num_pixels"].dtype == torch.int64


@pytest.mark.parametrize("collate", [rl_collate_fn, lambda data: sft_collate_fn(data, TOKENIZER, 1)])
def test_batches_of_token_ids_have_no_key_for_inputs(collate):
    assert "row_inputs" not in collate([datum(0), datum(1)])
    assert len(collate([datum(0), datum(1, pixels(1))])["row_inputs"]) == 2


def test_both_answers_of_a_pair_keep_their_inputs():
    pair = {f"message_log_{side}": datum()["message_log"] for side in ("chosen", "rejected")}
    pair |= {"length_chosen": 5, "length_rejected": 5, "loss_multiplier": 1.0, "idx": 0}
    pair |= {"row_inputs_chosen": pixels(1), "row_inputs_rejected": pixels(3)}
    batch = preference_collate_fn([pair], TOKENIZER, 1, add_loss_mask=True)
    assert [len(inputs.inputs["pixels"].values) for inputs in batch["row_inputs"]] == [1, 3]


def test_kto_refuses_rows_with_inputs_by_name():
    with pytest.raises(DataError, match=r"pixels \(float32 \[n, 2\]\), but KTO"):
        feedback_collate_fn([datum(0, pixels(1), desirable=True)], TOKENIZER, 1)


def test_rows_of_one_batch_need_one_shape():
    other = RowInputs({"pixels": RowInput(torch.zeros(1, 3), lengths_as="num_pixels")})
    with pytest.raises(DataError, match=r"'pixels' is float32 \[n, 3\] in row 1 and float32 \[n, 2\] in row 0"):
        completed([pixels(1), other])


@pytest.mark.parametrize("name", ["input_ids", "position_ids", "use_cache"])
def test_names_of_other_arguments_are_refused(name):
    with pytest.raises(DataError, match=name):
        RowInputs({name: RowInput(torch.zeros(1))})


@pytest.mark.parametrize("values", [torch.tensor(1.0), [1.0]])
def test_an_input_is_a_tensor_of_items(values):
    with pytest.raises(DataError, match="'pixels' must be a tensor"):
        RowInputs({"pixels": RowInput(values)})


def test_a_row_that_is_cut_loses_its_items():
    cut = datum(0, pixels(3, count_down))
    cut_to_stub(cut, 4)
    assert cut["row_inputs"].inputs["pixels"].values.shape == (0, 2)
    assert cut["row_inputs"].positions is None


def test_copies_share_the_tensors_and_pickles_equal_them():
    batch = BatchedDataDict(row_inputs=[pixels(50_000, count_down)]).repeat_interleave(4)
    assert len({id(inputs) for inputs in batch["row_inputs"]}) == 1
    data = pickle.dumps(batch)
    assert len(data) < 2 * 50_000 * 8, "four rows that share one input are pickled once"
    (first, *_) = pickle.loads(data)["row_inputs"]
    assert torch.equal(first.inputs["pixels"].values, pixels(50_000).inputs["pixels"].values)
    assert (first.inputs["pixels"].lengths_as, first.positions) == ("num_pixels", count_down)
    assert copy.deepcopy(first) is first


def test_positions_lie_where_the_tokens_lie():
    rows = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    column = [RowInputs(positions=count_down), RowInputs()]
    assert position_ids(rows, column, 4, "right").tolist() == [[2, 1, 0, 0], [0, 1, 0, 0]]
    assert position_ids(rows, column, 4, "left").tolist() == [[0, 2, 1, 0], [0, 0, 0, 1]]
    assert position_ids(rows, column, 7, "packed").tolist() == [[2, 1, 0, 0, 1, 0, 1]]


def test_positions_of_several_dimensions_come_first():
    rows = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    column = [RowInputs(positions=two_axes), RowInputs()]
    padded, packed = position_ids(rows, column, 3, "right"), position_ids(rows, column, 6, "packed")
    assert padded.tolist() == [[[0, 1, 2], [0, 1, 0]], [[0, 2, 4], [0, 1, 0]]]
    assert packed.tolist() == [[[0, 1, 2, 0, 1, 0]], [[0, 2, 4, 0, 1, 0]]]


def test_a_position_rule_gives_a_position_to_each_token():
    with pytest.raises(DataError, match=r"n=3 tokens of a row, got torch.int64 \[2\]"):
        position_ids([torch.tensor([1, 2, 3])], [RowInputs(positions=lambda ids, inputs: ids[1:])], 3, "right")


def test_rows_with_inputs_share_no_prompt():
    ids = torch.arange(20).repeat(2, 1)
    ids[1, 15:] += 1
    rows = BatchedDataDict(input_ids=ids, input_lengths=torch.tensor([20, 20]))
    assert BatchRows.of(rows).prefixes().shared == [0, 14]
    assert BatchRows.of(BatchedDataDict(rows | {"row_inputs": [pixels(1)] * 2})).prefixes().is_flat


def test_trajectories_bring_their_inputs_into_the_training_batch():
    log = datum()["message_log"]
    log[1]["generation_logprobs"] = torch.zeros(2)
    made = [Trajectory(0, row, 0, "t", log, 3, reward=1.0, row_inputs=own) for row, own in enumerate((pixels(2), None))]
    batch = build_training_batch(made, 0, mask_truncated=False)
    assert [len(inputs.inputs["pixels"].values) for inputs in batch["row_inputs"]] == [2, 0]
    assert "row_inputs" not in build_training_batch(made[1:], 0, mask_truncated=False)


def test_a_stored_trajectory_keeps_the_inputs_of_its_row(tmp_path):
    sample = Trajectory(0, 0, 0, "math", [{"role": "user", "content": "", "token_ids": torch.tensor([7])}], 1)
    sample.row_inputs = pixels(3)
    torch.save(sample.state_dict(), tmp_path / "sample.pt")
    restored = Trajectory.from_state(torch.load(tmp_path / "sample.pt", weights_only=True))
    assert restored.row_inputs is not None
    assert torch.equal(restored.row_inputs.inputs["pixels"].values, pixels(3).inputs["pixels"].values)
    assert restored.row_inputs.inputs["pixels"].lengths_as == "num_pixels"


def test_a_row_with_its_own_position_rule_is_not_stored():
    sample = Trajectory(0, 0, 0, "math", [], 0)
    sample.row_inputs = pixels(1, count_down)
    with pytest.raises(DataError, match="own position rule cannot be stored"):
        sample.state_dict()
