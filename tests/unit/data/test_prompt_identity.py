"""The identity of a prompt is that of its content, whatever its place."""

from typing import Any

import torch

from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.prompt_identity import PromptIdentities
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


def prompts(*rows: tuple[list[int], str]) -> BatchedDataDict[Any]:
    data: list[Any] = [
        {
            "message_log": [{"role": "user", "content": "", "token_ids": torch.tensor(tokens)}],
            "length": len(tokens),
            "extra_env_info": {"ground_truth": truth, "grader": object()},
            "loss_multiplier": 1.0,
            "idx": index,
            "task_name": "math",
        }
        for index, (tokens, truth) in enumerate(rows)
    ]
    return rl_collate_fn(data)


A, B, OTHER_TRUTH = ([1, 2], "3"), ([1, 3], "4"), ([1, 2], "9")


def test_identities_do_not_depend_on_batches_and_order() -> None:
    whole = PromptIdentities().of(prompts(A, B, OTHER_TRUTH))
    assert len(set(whole)) == 3
    one_by_one = PromptIdentities()
    assert tuple(one_by_one.of(prompts(row))[0] for row in (A, B, OTHER_TRUTH)) == whole
    assert PromptIdentities().of(prompts(OTHER_TRUTH, A, B)) == (whole[2], whole[0], whole[1])


def test_equal_prompts_are_counted() -> None:
    first, other, second = PromptIdentities().of(prompts(A, B, A))
    assert len({first, other, second}) == 3
    assert set(PromptIdentities().of(prompts(A, A))) == {first, second}
