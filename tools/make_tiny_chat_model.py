"""Make `examples/assets/tiny-chat`: a one-million-parameter chat model that is mediocre at sums.

It trains a small Qwen2 with plain supervised steps on the CPU: first on correctly worked two-digit sums, then on a
mixture in which about 60 % end in a wrong answer. Less than half of the sampled answers are then right, so there is
something to improve by reinforcement learning. Invariant: one seed gives one model; the validation problems of the
arithmetic task are never trained on.

    uv run python tools/make_tiny_chat_model.py --output examples/assets/tiny-chat
"""

import argparse
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tiny_models import (
    make_char_tokenizer,
    make_tiny_model,
    save_tiny_checkpoint,
)
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from nemo_rl.data.datasets.arithmetic import is_validation

logger = logging.getLogger("make_tiny_chat_model")

MAX_MISS = 9
"""A hasty answer is wrong by 1 to 9, so that guessing without working almost never succeeds."""
IGNORED_LABEL = -100

type DrawTargets = Callable[[int, random.Random], list[tuple[str, str]]]
"""Function from a step's number (from 1) and a random generator to the step's problems and target texts."""


@dataclass(frozen=True)
class Recipe:
    """Settings of the model's training.

    Attributes:
        seed: seed of weights, problems and slips.
        clean_steps: optimizer steps on correctly worked sums.
        mixed_steps: optimizer steps on the mixture with wrong answers.
        batch_size: worked sums per step.
        learning_rate: peak of a linear warm-up and linear decay, AdamW.
        hasty_share: share of the mixture that skips the working and boxes a wrong number.
        slip_share: share of the mixture's worked targets with one slip and therefore a wrong number.
    """

    seed: int = 0
    clean_steps: int = 350
    mixed_steps: int = 150
    batch_size: int = 64
    learning_rate: float = 3e-3
    hasty_share: float = 0.55
    slip_share: float = 0.08

    @property
    def steps(self) -> int:
        """Total number of optimizer steps."""
        return self.clean_steps + self.mixed_steps


def all_problems(held_out: bool) -> list[tuple[int, int]]:
    """Return all two-digit problems of the arithmetic task's validation split, or of its training split."""
    operands = torch.cartesian_prod(torch.arange(10, 100), torch.arange(10, 100)).numpy()
    return [(int(a), int(b)) for a, b in operands[is_validation(operands) == held_out]]


def change_a_digit(value: int, rng: random.Random) -> int:
    """Replace one digit of a number by a different one."""
    digits = list(str(value))
    place = rng.randrange(len(digits))
    first_allowed = 1 if place == 0 else 0
    choices = [d for d in range(first_allowed, 10) if str(d) != digits[place]]
    digits[place] = str(rng.choice(choices))
    return int("".join(digits))


def worked_answer(left: int, right: int, slip: str | None, rng: random.Random) -> str:
    r"""Write the column addition, with at most one slip.

    Args:
        left: first operand, two digits.
        right: second operand, two digits.
        slip: None for correct working; "units" for a units column that is off by one, "carry" for
            a carry that is forgotten or invented, "copy" for a final number with one wrong digit.
        rng: source of the slip's details.

    Returns:
        For example `7+5=12, 3+8+1=12, \boxed{122}`.
    """
    units = left % 10 + right % 10
    if slip == "units":
        units += 1 if units == 0 or rng.random() < 0.5 else -1
    carry = units // 10
    if slip == "carry":
        carry = 1 - carry
    tens = left // 10 + right // 10 + carry
    answer = 10 * tens + units % 10
    if slip == "copy":
        answer = change_a_digit(answer, rng)
    carried = "+1" if carry else ""
    return f"{left % 10}+{right % 10}={units}, {left // 10}+{right // 10}{carried}={tens}, \\boxed{{{answer}}}"


def sample_target(left: int, right: int, recipe: Recipe, rng: random.Random) -> str:
    """Draw one target of the mixture: hasty and wrong, worked with a slip, or worked and right."""
    if rng.random() < recipe.hasty_share:
        miss = rng.choice([-1, 1]) * rng.randint(1, MAX_MISS)
        return f"\\boxed{{{left + right + miss}}}"
    slip = rng.choice(["units", "carry", "copy"]) if rng.random() < recipe.slip_share else None
    return worked_answer(left, right, slip, rng)


def prompt_ids(tokenizer: PreTrainedTokenizerFast, problem: str) -> list[int]:
    """Return the token ids of the chat prompt for one problem, including the generation prompt."""
    turns = [{"role": "user", "content": problem}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def collate(rows: list[tuple[list[int], list[int]]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-pad (prompt, target) id pairs into input ids and labels, both [B, T] int64."""
    width = max(len(prompt) + len(target) for prompt, target in rows)
    input_ids = torch.full((len(rows), width), pad_id)
    labels = torch.full((len(rows), width), IGNORED_LABEL)
    for row, (prompt, target) in enumerate(rows):
        end = len(prompt) + len(target)
        input_ids[row, :end] = torch.tensor(prompt + target)
        labels[row, len(prompt) : end] = torch.tensor(target)
    return input_ids, labels


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
    """Train the model on two-digit sums: worked ones first, then the mixture."""
    problems = all_problems(held_out=False)

    def draw(step: int, rng: random.Random) -> list[tuple[str, str]]:
        pairs = []
        for left, right in rng.choices(problems, k=recipe.batch_size):
            if step <= recipe.clean_steps:
                text = worked_answer(left, right, None, rng)
            else:
                text = sample_target(left, right, recipe, rng)
            pairs.append((f"{left}+{right}=", text))
        return pairs

    train_on(model, tokenizer, recipe, draw)


def train_on(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, draw: DrawTargets) -> None:
    """Train by next-token prediction on the targets that `draw` returns for each step."""
    rng = random.Random(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    warmup = max(1, recipe.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, (recipe.steps - step) / (recipe.steps - warmup)),
    )
    model.train()
    for step in range(1, recipe.steps + 1):
        rows = []
        for problem, text in draw(step, rng):
            target = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
            rows.append((prompt_ids(tokenizer, problem), target))
        input_ids, labels = collate(rows, tokenizer.pad_token_id)
        logits = model(input_ids=input_ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == 1:
            logger.info("step %d/%d loss %.4f", step, recipe.steps, loss.item())
    model.eval()


@torch.no_grad()
def accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, temperature: float, seed: int = 0
) -> tuple[float, float]:
    """Return the share of held-out problems answered right, and the mean answer length in tokens.

    Args:
        model: the model to measure.
        tokenizer: its tokenizer.
        temperature: 0 for greedy decoding.
        seed: seed of the sampling.
    """
    problems = all_problems(held_out=True)
    prompts = torch.tensor([prompt_ids(tokenizer, f"{a}+{b}=") for a, b in problems])
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=48,
        **(sampling if temperature > 0 else {"do_sample": False}),
    )[:, prompts.shape[1] :]
    texts = tokenizer.batch_decode(output, skip_special_tokens=True)
    right = sum(text.endswith(f"\\boxed{{{a + b}}}") for text, (a, b) in zip(texts, problems, strict=True))
    return right / len(problems), (output != tokenizer.pad_token_id).sum(1).float().mean().item()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--clean-steps", type=int, default=Recipe.clean_steps)
    parser.add_argument("--mixed-steps", type=int, default=Recipe.mixed_steps)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    return parser.parse_args()


def main() -> None:
    """Train, store in bfloat16, load in float32 and report the accuracy of the stored model."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    recipe = Recipe(arguments.seed, arguments.clean_steps, arguments.mixed_steps)
    tokenizer = make_char_tokenizer()
    model = make_tiny_model("qwen2", seed=recipe.seed)
    started = time.monotonic()
    train(model, tokenizer, recipe)
    logger.info("trained in %.0f s", time.monotonic() - started)
    save_tiny_checkpoint(arguments.output, model.to(torch.bfloat16), tokenizer)
    stored = type(model).from_pretrained(arguments.output, dtype=torch.float32).eval()
    for temperature in (1.0, 0.0):
        share, length = accuracy(stored, tokenizer, temperature)
        logger.info(
            "held-out accuracy at temperature %.0f: %.3f, mean answer %.1f tokens",
            temperature,
            share,
            length,
        )


if __name__ == "__main__":
    main()
