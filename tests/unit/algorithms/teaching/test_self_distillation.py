"""The policy as its own teacher: which prompt it reads, where its scores go, and which contexts are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.rollout.batches import build_training_batch
from nemo_rl.algorithms.rollout.environments import response_data
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.algorithms.teaching.prompts import TeacherPrompts
from nemo_rl.algorithms.teaching.self_distillation import (
    PrivilegedPrompts,
    SelfTeacher,
    solutions_of,
    with_context,
)
from nemo_rl.algorithms.teaching.stages import teacher_stages
from nemo_rl.config import GRPOMasterConfig, SelfDistillationConfig, load_config
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.utils.errors import ConfigError, DataError

CONFIG = Path(__file__).resolve().parents[4] / "examples/configs/grpo_math_cpu.yaml"
HINT = "It is {ground_truth}."


def config_of(*overrides: str, context: str = HINT) -> GRPOMasterConfig:
    section = "on_policy_distillation.self_distillation"
    keys = (f"{section}.enabled=true", f"{section}.context='{context}'", "on_policy_distillation.enabled=true")
    return load_config(CONFIG, ["grpo.adv_estimator.name=opd", *keys, *overrides])


TOKENIZER = get_tokenizer(config_of().policy.tokenizer)
RUN_DATA = response_data(TOKENIZER, config_of())
DATA = RUN_DATA.train


class TokenScores:
    """A model whose log-probability of a token is minus its id, and which notes what it reads."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.of_reference = 0

    def get_logprobs(self, rows: BatchedDataDict[Any]) -> dict[str, torch.Tensor]:
        ids = zip(rows["input_ids"], rows["input_lengths"], strict=True)
        self.seen += [TOKENIZER.decode(row[:length]) for row, length in ids]
        return {"logprobs": -rows["input_ids"].float()}

    def get_reference_policy_logprobs(self, rows: BatchedDataDict[Any]) -> dict[str, torch.Tensor]:
        self.of_reference += 1
        return {"reference_logprobs": self.get_logprobs(rows)["logprobs"]}


def sample(idx: int, answer: str, reward: float | None, group: int = 0) -> Trajectory:
    datum = DATA[idx]
    ids = torch.tensor(TOKENIZER.encode(answer))
    written = {"role": "assistant", "content": answer, "token_ids": ids, "generation_logprobs": torch.zeros(len(ids))}
    length = len(datum["message_log"][0]["token_ids"])
    log = [*datum["message_log"], written]
    return Trajectory(group, 0, idx, "math", log, length, reward=reward, extra_env_info=datum["extra_env_info"])


def scored(*samples: Trajectory, longest: int = 128, **keys: Any) -> tuple[TokenScores, StepBatch, dict[str, float]]:
    policy, section = TokenScores(), SelfDistillationConfig.build(**{"enabled": True, "context": HINT} | keys)
    batch = StepBatch(build_training_batch(samples, 0, mask_truncated=False, needs_reward=False), samples)
    batch.tensors["prev_logprobs"] = torch.full(batch.tensors["input_ids"].shape, -0.5)
    metrics = SelfTeacher(policy, PrivilegedPrompts(section, TeacherPrompts(DATA, TOKENIZER)), longest).apply(batch)  # type: ignore[arg-type]
    return policy, batch, metrics


def test_the_teacher_reads_the_context_and_scores_the_students_tokens() -> None:
    first, second = sample(0, "38", 1.0), sample(1, "a longer one", 0.0, group=1)
    policy, batch, metrics = scored(first, second)
    hinted = [DATA[idx]["chat"]["messages"][0]["content"] for idx in (0, 1)]
    answers = [DATA[idx]["extra_env_info"]["ground_truth"] for idx in (0, 1)]
    for text, question, truth, answer in zip(policy.seen, hinted, answers, ("38", "a longer one"), strict=True):
        assert f"{question}\n\nIt is {truth}.<|im_end|>" in text
        assert text.endswith(f"assistant\n{answer}")
    tensors = batch.tensors
    written = tensors["token_mask"] != 0
    assert torch.equal(tensors["teacher_logprobs"][written], -tensors["input_ids"][written].float())
    assert (tensors["teacher_logprobs"][~written] == -0.5).all()
    gap = (-0.5 + tensors["input_ids"][written]).mean()
    assert metrics["self_teacher/reverse_kl"] == pytest.approx(float(gap))
    assert metrics["self_teacher/num_rows"] == 2


def test_a_sample_without_a_right_answer_of_another_has_no_teacher() -> None:
    group = [sample(0, "38", 1.0), sample(0, "12", 0.0), sample(0, "39", 1.0)]
    lone = sample(1, "7", 1.0, group=1)
    assert solutions_of([*group, lone]) == ["39", "38", "38", None]
    policy, batch, metrics = scored(*group, lone, context="A solution: {solution}")
    assert "A solution: 38" in policy.seen[1]
    assert metrics["self_teacher/num_rows"] == 3
    assert torch.equal(batch.tensors["teacher_logprobs"][3], batch.tensors["prev_logprobs"][3])


def test_a_teacher_that_would_read_too_much_is_counted() -> None:
    whole = sample(0, "38", 1.0)
    longest = whole.length + len(TOKENIZER.encode("\n\nIt is 38."))
    assert scored(whole, longest=longest)[2]["self_teacher/num_too_long"] == 0
    policy, batch, metrics = scored(whole, longest=longest - 1)
    assert (metrics["self_teacher/num_too_long"], policy.seen) == (1, [])
    assert torch.equal(batch.tensors["teacher_logprobs"], batch.tensors["prev_logprobs"])


def test_the_initial_weights_may_be_the_teacher() -> None:
    assert scored(sample(0, "38", 1.0), weights="initial")[0].of_reference == 1
    initial = config_of("on_policy_distillation.self_distillation.weights=initial")
    assert (initial.keeps_reference, config_of().keeps_reference) == (True, False)


def test_tokens_have_their_weights() -> None:
    key = "on_policy_distillation.self_distillation.token_weights"
    config = config_of(f"{key}={{name: thinking, thinking: 3, answer: 0.5, thinking_tags: ['(', ')']}}")
    (stage,) = teacher_stages(config, RUN_DATA, TOKENIZER)({"policy": TokenScores()})  # type: ignore[dict-item]
    whole = sample(0, "(12)3", 1.0)
    batch = StepBatch(build_training_batch([whole], 0, mask_truncated=False, needs_reward=False), [whole])
    batch.tensors["prev_logprobs"] = torch.full(batch.tensors["input_ids"].shape, -0.5)
    stage.apply(batch)
    gaps = (batch.tensors["teacher_logprobs"] + 0.5)[batch.tensors["token_mask"] != 0]
    own = torch.tensor([0.5 - token for token in TOKENIZER.encode("(12)3")])
    assert torch.equal(gaps, own * torch.tensor([0.5, 3, 3, 0.5, 0.5]))


def test_a_context_stands_at_the_end_of_the_last_message_of_its_role() -> None:
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": None}
    chat["messages"].append({"role": "user", "content": [{"type": "text", "text": "c"}]})
    added = with_context(chat, "hint", "user")["messages"]  # type: ignore[arg-type]
    assert added[2]["content"] == [{"type": "text", "text": "c"}, {"type": "text", "text": "\n\nhint"}]
    assert [m["content"] for m in with_context(chat, "hint", "system")["messages"]][:2] == ["hint", "a"]  # type: ignore[arg-type]
    assert len(chat["messages"]) == 3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"context": "Think."}, "has no field of the row"),
        ({"context": "It is {ground_truth"}, "is no template"),
        ({"overrides": ("teachers.math={model_name: examples/assets/tiny-teacher}",)}, "Leave the other teachers out"),
        ({"overrides": ("on_policy_distillation.enabled=false",)}, "self_distillation.enabled is set"),
        ({"overrides": ("grpo.adv_estimator.name=grpo",)}, "does not use"),
    ],
)
def test_a_context_that_tells_nothing_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(*keys.pop("overrides", ()), **keys)


def test_a_context_is_tried_on_the_first_row() -> None:
    with pytest.raises(ConfigError, match=r"cannot be filled in for row 0: KeyError.*There are: \{ground_truth\}"):
        teacher_stages(config_of(context="{hint}"), RUN_DATA, TOKENIZER)
    without_chat = [{**DATA[0], "extra_env_info": {"ground_truth": ""}}]
    del without_chat[0]["chat"]
    with pytest.raises(DataError, match="has no `chat`"):
        teacher_stages(config_of(), replace(RUN_DATA, train=without_chat), TOKENIZER)  # type: ignore[arg-type]


def test_a_prompt_that_is_not_that_of_the_row_is_named() -> None:
    other = sample(0, "38", 1.0)
    other.idx = 1
    with pytest.raises(DataError, match="row 1: the prompt of a sample is not that of its row"):
        scored(other)
