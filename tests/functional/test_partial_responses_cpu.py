"""Unfinished answers in a checkpoint are continued: no token changes, and log-probabilities are those of the policy.

With a learning rate of 0 all weight versions are the same weights. So with one seed every mode of overlap has to train
on the same tokens, whatever finishes when, and a likeliest answer is the same whether it was interrupted or not.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from example_runs import REPOSITORY, ExampleRun, StartExample
from trained_samples import resumed_tokens, sequences, trained
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(900)]

NUM_PROMPTS = 64
EPOCH = (
    "policy.optimizer.kwargs.lr=0.0",
    f"data.train.num_samples={NUM_PROMPTS}",
    "grpo.max_num_epochs=1",
    "grpo.num_generations_per_prompt=4",
    "policy.train_global_batch_size=32",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "checkpointing.save_period=2",
    "logger.tensorboard_enabled=false",
)
FEW_AT_A_TIME = ("+policy.generation.vllm_kwargs.max_num_seqs=4",)
"""So that answers are unfinished whenever a checkpoint is written."""
AHEAD = (
    *FEW_AT_A_TIME,
    "grpo.overlap.mode=ahead",
    "grpo.overlap.order=ready_first",
    "grpo.overlap.in_flight_weight_updates=true",
    "grpo.overlap.max_age_steps=3",
)
LIKELIEST = ("policy.generation.top_p=1.0e-6",)
"""Each token is the likeliest one; a run refuses temperature=0."""


def finished(start: StartExample, name: str, *overrides: str) -> ExampleRun:
    run = start("run_grpo.py", "grpo_math_cpu.yaml", *EPOCH, *overrides, "checkpointing.enabled=false", logs=name)
    assert run.finish() == 0, run.log()[-3000:]
    return run


def killed_and_resumed(start: StartExample, folder: Path, *overrides: str) -> tuple[ExampleRun, ExampleRun]:
    overrides = (*EPOCH, *AHEAD, *overrides, f"checkpointing.checkpoint_dir={folder}/checkpoints")
    killed = start("run_grpo.py", "grpo_math_cpu.yaml", *overrides)
    killed.wait_for("step 3/")
    killed.process.kill()
    killed.finish()
    resumed = start("run_grpo.py", "grpo_math_cpu.yaml", *overrides, logs="resumed")
    assert resumed.finish() == 0, resumed.log()[-3000:]
    return killed, resumed


@pytest.mark.long
def test_a_continued_answer_has_the_tokens_of_an_uninterrupted_one(start_example: StartExample, tmp_path: Path) -> None:
    in_turns = finished(start_example, "none", *LIKELIEST)
    runs = killed_and_resumed(start_example, tmp_path, *LIKELIEST)
    continued, restarted = resumed_tokens(runs[1])
    assert continued > 0
    assert restarted == 0
    assert sequences(trained(*runs)) == sequences(trained(in_turns))


@pytest.mark.long
def test_continued_answers_have_the_log_probabilities_of_the_policy(
    start_example: StartExample, tmp_path: Path
) -> None:
    runs = killed_and_resumed(start_example, tmp_path)
    continued, _ = resumed_tokens(runs[1])
    samples = trained(*runs)
    assert continued > 0
    assert Counter(sample["idx"] for sample in samples) == dict.fromkeys(range(NUM_PROMPTS), 4)
    assert logprob_error(samples) < 1e-4


@torch.no_grad()
def logprob_error(samples: list[dict[str, Any]]) -> float:
    """Largest difference of recorded log-probabilities to those of the model, by one forward pass for each sample."""
    model = AutoModelForCausalLM.from_pretrained(REPOSITORY / "examples/assets/tiny-chat", dtype=torch.float64)
    errors = []
    for sample in samples:
        ids = torch.tensor(sample["token_ids"])
        expected = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        written = torch.tensor(sample["token_loss_mask"][1:], dtype=torch.bool)
        recorded = torch.tensor(sample["generation_logprobs"][1:], dtype=torch.float64)
        errors.append(float((expected - recorded)[written].abs().max()))
    return max(errors)


@pytest.mark.long
def test_both_modes_train_on_the_same_tokens_also_after_a_kill_that_restarts_answers(
    start_example: StartExample, tmp_path: Path
) -> None:
    expected = sequences(trained(finished(start_example, "none")))
    assert expected.total() == 4 * NUM_PROMPTS
    assert sequences(trained(finished(start_example, "ahead", *AHEAD))) == expected
    runs = killed_and_resumed(start_example, tmp_path, "grpo.overlap.partial_responses=restart")
    continued, restarted = resumed_tokens(runs[1])
    assert continued == 0
    assert restarted > 0
    assert sequences(trained(*runs)) == expected
