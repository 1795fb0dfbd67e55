"""GRPO in one file: a Hugging Face model, `model.generate`, and this library's losses and advantages.

    uv run --extra cpu python examples/minimal_grpo.py [--steps 40]

No Ray, no engine, no configuration file: the same step as `run_grpo.py`, small enough to read from top to bottom.
A chat model of one million parameters, which adds numbers badly at first, learns sums on the CPU.

One step, top to bottom in `main`:

    prompts ─► sample G answers each ─► reward ─► batch [B, T] ─► advantages ─► loss ─► optimizer

Legend: `P` prompts, `G` answers per prompt, `B = P x G` samples, `T` tokens.
"""

import argparse
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from nemo_rl.algorithms.credit.advantages import make_advantage_estimator
from nemo_rl.algorithms.loss import ClippedPGLossFn
from nemo_rl.algorithms.rollout.batches import build_training_batch
from nemo_rl.algorithms.utils import get_tokenizer, set_seed
from nemo_rl.config import ClippedPGLossConfig, GRPOConfig, TokenizerConfig
from nemo_rl.data.datasets.arithmetic import ArithmeticDataset
from nemo_rl.experience.trajectory import Trajectory

MODEL = Path(__file__).parent / "assets" / "tiny-chat"
NUM_PROMPTS = 8
NUM_GENERATIONS = 8
MAX_NEW_TOKENS = 48
LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 1.0
VALIDATION_SAMPLES = 128


def encode_prompts(tokenizer: PreTrainedTokenizerBase, rows: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the token ids of each row's question as a chat that ends with the assistant's header."""
    chats = [
        tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True) for row in rows
    ]
    return [tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats]


@torch.no_grad()
def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], *, greedy: bool
) -> tuple[list[list[int]], list[list[float]]]:
    """Continue every prompt once.

    Args:
        model: model in evaluation mode.
        tokenizer: its padding and end-of-turn tokens are used.
        prompts: token ids; they may differ in length.
        greedy: take the most likely token instead of drawing at temperature 1.

    Returns:
        Token ids of each answer, end-of-turn token included, and their log-probabilities.
    """
    width = max(map(len, prompts))
    input_ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(ids)) + ids for ids in prompts])
    attention_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    output = model.generate(
        input_ids,
        attention_mask=attention_mask,
        do_sample=not greedy,
        temperature=None if greedy else 1.0,
        top_k=None if greedy else 0,
        top_p=None if greedy else 1.0,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        output_logits=True,
        return_dict_in_generate=True,
    )
    answers = output.sequences[:, width:]
    logprobs = torch.stack(output.logits, dim=1).log_softmax(-1)
    chosen = logprobs.gather(-1, answers[..., None]).squeeze(-1)
    ids: list[list[int]] = []
    scores: list[list[float]] = []
    for row, row_scores in zip(answers.tolist(), chosen.tolist(), strict=True):
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        ids.append(row[:end])
        scores.append(row_scores[:end])
    return ids, scores


def reward_of(answer: str, truth: str) -> float:
    """Return 1 if the last boxed number is the right one, else 0."""
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", answer)
    return float(bool(boxed) and boxed[-1].strip() == truth)


def roll_out(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[dict[str, Any]]
) -> list[Trajectory]:
    """Sample `NUM_GENERATIONS` answers to every question and grade them."""
    prompts = encode_prompts(tokenizer, rows)
    repeated = [ids for ids in prompts for _ in range(NUM_GENERATIONS)]
    answers, logprobs = sample(model, tokenizer, repeated, greedy=False)
    trajectories = []
    for index, (ids, scores) in enumerate(zip(answers, logprobs, strict=True)):
        group, number = divmod(index, NUM_GENERATIONS)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        question = {"role": "user", "content": rows[group]["problem"], "token_ids": torch.tensor(prompts[group])}
        answer = {
            "role": "assistant",
            "content": text,
            "token_ids": torch.tensor(ids),
            "generation_logprobs": torch.tensor(scores),
        }
        trajectories.append(
            Trajectory(
                group_index=group,
                sample_index=number,
                idx=index,
                task_name="arithmetic",
                message_log=[question, answer],
                prompt_length=len(prompts[group]),
                reward=reward_of(text, rows[group]["answer"]),
            )
        )
    return trajectories


def next_token_logprobs(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Return `[B, T-1]` log-probabilities of tokens 1..T-1; causal attention needs no mask for right padding."""
    logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[dict[str, Any]]) -> float:
    """Return the share of questions that greedy decoding answers right."""
    answers, _ = sample(model, tokenizer, encode_prompts(tokenizer, rows), greedy=True)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return sum(reward_of(text, row["answer"]) for text, row in zip(texts, rows, strict=True)) / len(rows)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, print a line per step, and return the mean reward of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="training steps (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="seed of problems and sampling (default: 0)")
    options = parser.parse_args(arguments)

    set_seed(options.seed)
    transformers_logging.disable_progress_bar()
    tokenizer = get_tokenizer(TokenizerConfig.build(name=str(MODEL)))
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    problems = ArithmeticDataset("train", options.steps * NUM_PROMPTS, seed=options.seed).dataset
    held_out = ArithmeticDataset("validation", VALIDATION_SAMPLES, seed=options.seed).dataset

    # No reference policy; one update per batch, so the ratio to the sampling policy is 1 at the update.
    loss_config = ClippedPGLossConfig.build(reference_policy_kl_penalty=0.0)
    loss_fn = ClippedPGLossFn(loss_config)
    estimator = make_advantage_estimator(GRPOConfig.build(), loss_config)

    model.eval()
    print(f"validation accuracy before: {accuracy(model, tokenizer, held_out):.2f}")
    mean_rewards = []
    for step in range(1, options.steps + 1):
        started = time.perf_counter()
        rows = [problems[i] for i in range((step - 1) * NUM_PROMPTS, step * NUM_PROMPTS)]
        trajectories = roll_out(model, tokenizer, rows)
        batch = build_training_batch(trajectories, tokenizer.pad_token_id, mask_truncated=False)

        rewards = torch.tensor([t.reward for t in trajectories])
        groups = torch.tensor([t.group_index for t in trajectories])
        batch["advantages"] = estimator.compute_advantage(None, rewards, batch["token_mask"], group_ids=groups)

        logprobs = next_token_logprobs(model, batch["input_ids"])
        counted = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
        loss, metrics = loss_fn(
            logprobs, data=batch, global_valid_seqs=batch["sample_mask"].sum(), global_valid_toks=counted.sum()
        )
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()

        mean_rewards.append(float(rewards.mean()))
        print(
            f"step {step:3d}  reward={mean_rewards[-1]:.3f}  loss={loss.item():+.4f}  "
            f"grad_norm={grad_norm.item():.3f}  mult_err={float(metrics['token_mult_prob_error']):.6f}  "
            f"step_s={time.perf_counter() - started:.2f}",
            flush=True,
        )
    print(f"validation accuracy after:  {accuracy(model, tokenizer, held_out):.2f}")
    return mean_rewards


if __name__ == "__main__":
    main()
