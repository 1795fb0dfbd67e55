"""Message logs, collate functions and task prompts."""

import pytest
import torch

from nemo_rl.data.collate_fn import eval_collate_fn, preference_collate_fn, rl_collate_fn
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.llm_message_utils import (
    add_loss_mask_to_message_log,
    batched_message_log_to_flat_message,
    get_formatted_message_log,
    get_keys_from_message_log,
    message_log_shape,
    message_log_to_flat_messages,
)
from nemo_rl.utils.errors import DataError

pytestmark = pytest.mark.fast


def turn(role, *ids, **more):
    return {"role": role, "content": role[0], "token_ids": torch.tensor(ids), **more}


def two_turns():
    logprobs = torch.tensor([-0.5, -0.25])
    return [turn("user", 1, 2, 3), turn("assistant", 4, 5, generation_logprobs=logprobs)]


def test_flat_messages_fill_missing_per_token_values_with_zeros():
    flat = message_log_to_flat_messages(two_turns())
    assert flat["token_ids"].tolist() == [1, 2, 3, 4, 5]
    assert flat["generation_logprobs"].tolist() == [0, 0, 0, -0.5, -0.25]
    assert flat["role"] == ["user", "assistant"]


def test_flat_messages_refuse_a_missing_tensor_of_unknown_shape():
    log = [turn("user", 1, 2), turn("assistant", 3, pixels=torch.zeros(4, 4))]
    with pytest.raises(DataError, match=r"message 0 \(role 'user'\) has no tensor 'pixels'"):
        message_log_to_flat_messages(log)


def test_a_batch_is_right_padded():
    batch, lengths = batched_message_log_to_flat_message(
        [two_turns(), [turn("user", 7, 8), turn("assistant", 9, generation_logprobs=torch.ones(1))]],
        {"token_ids": 99},
        make_sequence_length_divisible_by=4,
    )
    assert lengths.tolist() == [5, 3] and lengths.dtype == torch.int64
    assert batch["token_ids"].tolist() == [[1, 2, 3, 4, 5, 99, 99, 99], [7, 8, 9] + [99] * 5]
    assert batch["generation_logprobs"][1].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert batch["content"] == [["u", "a"], ["u", "a"]]
    assert batch.size == 2


def test_a_tensor_that_only_some_logs_have_is_refused():
    with pytest.raises(DataError, match="1 of 2 message logs have no tensor 'generation_logprobs'"):
        batched_message_log_to_flat_message([two_turns(), [turn("user", 7)]])
    with pytest.raises(DataError, match="at least one log"):
        batched_message_log_to_flat_message([])


def test_the_loss_mask_covers_the_chosen_roles():
    log = [turn("user", 1), turn("assistant", 2, 3), turn("environment", 4), turn("assistant", 5)]
    add_loss_mask_to_message_log([log])
    assert message_log_to_flat_messages(log)["token_loss_mask"].tolist() == [0, 1, 1, 0, 1]
    add_loss_mask_to_message_log([log], only_unmask_final=True)
    assert message_log_to_flat_messages(log)["token_loss_mask"].tolist() == [0, 0, 0, 0, 1]
    add_loss_mask_to_message_log([log], roles_to_train_on=["user"])
    assert message_log_to_flat_messages(log)["token_loss_mask"].tolist() == [1, 0, 0, 0, 0]


def test_message_keys_and_shapes_are_returned():
    log = two_turns()
    assert get_keys_from_message_log(log, ["role", "generation_logprobs"])[0] == {"role": "user"}
    assert message_log_shape(log)[0] == {"token_ids": torch.Size([3])}


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "4"},
]


def test_formatted_pieces_join_to_the_rendered_chat(chat_tokenizer):
    for header in (False, True):
        log = get_formatted_message_log(
            CHAT, chat_tokenizer, TaskDataSpec(), False, False, add_generation_prompt=header
        )
        ids = torch.cat([message["token_ids"] for message in log]).tolist()
        assert ids == chat_tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)
        assert ("assistant" in log[1]["content"]) == header


def test_a_formatted_log_ends_with_one_eos(qwen3):
    log = get_formatted_message_log(CHAT, qwen3, TaskDataSpec())
    assert log[-1]["token_ids"].tolist().count(qwen3.eos_token_id) == 1
    assert log[-1]["token_ids"][-1] == qwen3.eos_token_id


def test_bos_is_added_once(minimind):
    log = get_formatted_message_log(CHAT, minimind, TaskDataSpec())
    assert log[0]["content"].startswith(minimind.bos_token + "system")


def test_task_prompts_are_read_from_files(tmp_path, bare_tokenizer):
    (tmp_path / "p.txt").write_text("{}+0")
    (tmp_path / "s.txt").write_text("1")
    spec = TaskDataSpec("math", tmp_path / "p.txt", tmp_path / "s.txt")
    chat = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    log = get_formatted_message_log(chat, bare_tokenizer, spec)
    assert [message["content"] for message in log] == ["1", "2+2+0", "4</s>"]
    assert chat[0]["content"] == "2+2"


@pytest.mark.parametrize(
    ("text", "message"),
    [("no place", "no {} placeholder"), ("{} {x}", "write every other brace twice")],
)
def test_prompt_files_without_one_placeholder_are_refused(tmp_path, text, message):
    (tmp_path / "p.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        TaskDataSpec(prompt_file=tmp_path / "p.txt").format_problem("1+1")


def test_a_prompt_file_may_have_doubled_braces(tmp_path):
    (tmp_path / "p.txt").write_text("{}\nAnswer in \\boxed{{}}.")
    spec = TaskDataSpec(prompt_file=tmp_path / "p.txt")
    assert spec.format_problem("1{}1") == "1{}1\nAnswer in \\boxed{}."


def test_missing_and_undecodable_prompt_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="prompt_file .*nowhere.txt.* cannot be read"):
        TaskDataSpec(prompt_file="nowhere.txt")
    (tmp_path / "s.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="system_prompt_file .* is not UTF-8"):
        TaskDataSpec(system_prompt_file=tmp_path / "s.txt")


def test_task_data_spec_copies_defaults_into_unset_fields(tmp_path):
    (tmp_path / "p.txt").write_text("{}!")
    spec = TaskDataSpec("math")
    spec.copy_defaults(TaskDataSpec("other", tmp_path / "p.txt"))
    assert (spec.task_name, spec.prompt) == ("math", "{}!")


def datum(idx, *ids, **more):
    return {
        "message_log": [turn("user", *ids)],
        "length": len(ids),
        "extra_env_info": {"ground_truth": str(idx)},
        "loss_multiplier": 1.0,
        "idx": idx,
        **more,
    }


def test_rl_collate_batches_prompts():
    batch = rl_collate_fn([datum(3, 1, 2, task_name="math"), datum(5, 1, stop_strings=["x"])])
    assert batch["length"].tolist() == [2, 1]
    assert batch["batch_max_length"].tolist() == [2, 2]
    assert batch["loss_multiplier"].dtype == torch.float32
    assert batch["task_name"] == ["math", None] and batch["stop_strings"] == [None, ["x"]]
    assert batch["idx"] == [3, 5] and batch.check_rows() == 2
    assert set(eval_collate_fn([datum(1, 2)])) == {"message_log", "extra_env_info", "idx"}


def test_preference_collate_interleaves_chosen_and_rejected(bare_tokenizer):
    pair = {
        "message_log_chosen": [turn("user", 1, 2), turn("assistant", 3, 4)],
        "message_log_rejected": [turn("user", 1, 2), turn("assistant", 5)],
        "length_chosen": 4,
        "length_rejected": 3,
        "loss_multiplier": 0.0,
        "idx": 0,
    }
    batch = preference_collate_fn([pair], bare_tokenizer, 4, add_loss_mask=True)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [1, 2, 5, 0]]
    assert batch["token_mask"].tolist() == [[0, 0, 1, 1], [0, 0, 1, 0]]
    assert batch["sample_mask"].tolist() == [0, 0]
    assert "token_mask" not in preference_collate_fn([pair], bare_tokenizer, 4, add_loss_mask=False)
