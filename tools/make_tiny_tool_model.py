"""Make `examples/assets/tiny-tools`: a one-million-parameter chat model that calls a calculator now and then.

It trains `tiny-chat` further with plain supervised steps on the CPU: first on products whose answer a calculator gives,
then on a mixture in which most answers are guessed. A product of two three-digit numbers is too hard for a guess, so an
answer is right only if the model calls the tool. Invariant: one seed gives one model; the validation problems of the
data set `arithmetic_products` are never trained on.

    uv run python tools/make_tiny_tool_model.py --output examples/assets/tiny-tools
"""

import argparse
import logging
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from make_tiny_chat_model import IGNORED_LABEL
from tiny_models import make_char_tokenizer, save_tiny_checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from nemo_rl.data.datasets.arithmetic import is_validation

logger = logging.getLogger("make_tiny_tool_model")

START = Path(__file__).parents[1] / "examples/assets/tiny-chat"
TOOL = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"properties": {"expression": {"type": "string"}}}},
}
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system' }}{% for tool in tools %}"
    "{{ '\n' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{% if message.tool_calls %}{{ '[' }}{% for call in message.tool_calls %}"
    "{{ (', ' if not loop.first else '') + call.function.name + '(' }}"
    "{% for name, value in call.function.arguments.items() %}"
    "{{ (', ' if not loop.first else '') + name + '=' + value | tojson }}"
    "{% endfor %}{{ ')' }}{% endfor %}{{ ']' }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """Settings of the model's training.

    Attributes:
        seed: seed of problems and guesses.
        clean_steps: optimizer steps on right calls.
        mixed_steps: optimizer steps on the mixture.
        batch_size: problems per step.
        learning_rate: peak of a linear warm-up and linear decay, AdamW.
        guess_share: share of the mixture that guesses although there is a tool.
        fault_share: share of the mixture whose call has a mistake, after which the model guesses.
        bare_share: share of the mixture without a tool.
    """

    seed: int = 0
    clean_steps: int = 500
    mixed_steps: int = 150
    batch_size: int = 24
    learning_rate: float = 2e-3
    guess_share: float = 0.5
    fault_share: float = 0.12
    bare_share: float = 0.15

    @property
    def steps(self) -> int:
        """Total number of optimizer steps."""
        return self.clean_steps + self.mixed_steps


type Turns = list[tuple[str, bool]]
"""Text of a conversation in pieces, each with whether the model writes it."""


def faulty_call(expression: str, rng: random.Random) -> tuple[str, str]:
    """Draw a call with one mistake, and the tool's answer to it."""
    return rng.choice(
        [
            (f'[calc(expression="{expression}")]', "Error: there is no tool 'calc'; there are: calculator"),
            (f'[calculator(formula="{expression}")]', "Error: calculator: expression: Field required"),
            (f'[calculator(expression="{expression}"]', "Error: the tool call cannot be read"),
        ]
    )


def conversation(left: int, right: int, kind: str, rng: random.Random) -> Turns:
    """Write the turns of one problem.

    Args:
        left: first factor.
        right: second factor.
        kind: "call", "fault", "guess" or "bare" (a guess without a tool in the prompt).
        rng: source of guesses and mistakes.
    """
    system = "" if kind == "bare" else "<|im_start|>system\ncalculator(expression)<|im_end|>\n"
    prompt = f"{system}<|im_start|>user\n{left}*{right}=<|im_end|>\n<|im_start|>assistant\n"
    guess = f"\\boxed{{{left * right + rng.choice([-1, 1]) * rng.randint(1, 999)}}}<|im_end|>"
    if kind in ("guess", "bare"):
        return [(prompt, False), (guess, True)]
    call, said, final = f'[calculator(expression="{left}*{right}")]', str(left * right), f"\\boxed{{{left * right}}}"
    if kind == "fault":
        call, said = faulty_call(f"{left}*{right}", rng)
        final = guess.removesuffix("<|im_end|>")
    answer = f"\n<|im_start|>tool\n{said}<|im_end|>\n<|im_start|>assistant\n"
    return [(prompt, False), (f"{call}<|im_end|>", True), (answer, False), (f"{final}<|im_end|>", True)]


def kind_of(step: int, recipe: Recipe, rng: random.Random) -> str:
    """Draw the kind of a conversation for a step."""
    if step <= recipe.clean_steps:
        return "call"
    if rng.random() < recipe.bare_share:
        return "bare"
    drawn = rng.random()
    return (
        "guess"
        if drawn < recipe.guess_share
        else "fault"
        if drawn < recipe.guess_share + recipe.fault_share
        else "call"
    )


def collate(rows: list[Turns], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input ids and labels `[B, T]` int64, right-padded; labels only where the model writes."""
    encoded = []
    for turns in rows:
        pieces = [(tokenizer(text, add_special_tokens=False)["input_ids"], written) for text, written in turns]
        ids = [token for piece, _ in pieces for token in piece]
        encoded.append((ids, [token if written else IGNORED_LABEL for piece, written in pieces for token in piece]))
    width = max(len(ids) for ids, _ in encoded)
    input_ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), IGNORED_LABEL)
    for row, (ids, wanted) in enumerate(encoded):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(ids)] = torch.tensor(wanted)
    return input_ids, labels


def draw_problem(rng: random.Random) -> tuple[int, int]:
    """Draw two three-digit factors of the training split."""
    while True:
        pair = torch.tensor([[rng.randint(100, 999), rng.randint(100, 999)]]).numpy()
        if not is_validation(pair)[0]:
            return int(pair[0, 0]), int(pair[0, 1])


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
    """Train by next-token prediction on what the model writes."""
    rng = random.Random(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    warmup = max(1, recipe.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (recipe.steps - step) / (recipe.steps - warmup))
    )
    model.train()
    for step in range(1, recipe.steps + 1):
        kinds = [kind_of(step, recipe, rng) for _ in range(recipe.batch_size)]
        input_ids, labels = collate([conversation(*draw_problem(rng), kind, rng) for kind in kinds], tokenizer)
        logits = model(input_ids=input_ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 25 == 0 or step == 1:
            logger.info("step %d/%d loss %.4f", step, recipe.steps, loss.item())
    model.eval()


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
    """Train the model and store it in bfloat16 with its tokenizer and chat template."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    recipe = Recipe(arguments.seed, arguments.clean_steps, arguments.mixed_steps)
    tokenizer = make_char_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(START, dtype=torch.float32)
    started = time.monotonic()
    train(model, tokenizer, recipe)
    logger.info("trained in %.0f s", time.monotonic() - started)
    save_tiny_checkpoint(arguments.output, model.to(torch.bfloat16), tokenizer)


if __name__ == "__main__":
    main()
