"""Define the workloads of the comparison with TRL: questions, limits of answers, and models that can answer.

`uniform`: sums of two numbers, answers of about the same length. `skewed`: count from one number to another and give
the number of steps, answers of 13 to 251 tokens with a mean of about a quarter of the longest.

Each workload has one model of a million parameters: the shipped one for `uniform`, the same one trained further for
`skewed`. The larger models compute the same function with more weights, so that every size gives answers of the same
lengths. Invariant: a model folder is made on first use and depends only on the seeds below.
"""

import logging
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from side_by_side import BENCH, ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

sys.path.insert(0, str(ROOT / "tools"))
from make_tiny_chat_model import Recipe, train_on
from tiny_models import TinyShape, make_tiny_model, save_tiny_checkpoint

logger = logging.getLogger(__name__)

NUM_PROMPTS = 20_000
PROMPT_SEED = 1
TINY_CHAT = ROOT / "examples" / "assets" / "tiny-chat"
SIZES = {
    "1m": TinyShape(),
    "3m": TinyShape(hidden_size=256, intermediate_size=768, num_heads=8, num_kv_heads=4),
    "25m": TinyShape(hidden_size=512, intermediate_size=1536, num_heads=16, num_kv_heads=8, num_layers=8),
}
MOST_STEPS = 80
SKEWED_RECIPE = Recipe(clean_steps=300, mixed_steps=0, batch_size=16, learning_rate=2e-3)
INTO_RESIDUAL = ("embed_tokens.weight", "o_proj.weight", "down_proj.weight")
"""Weights whose output is added to the residual stream."""


class Problem(NamedTuple):
    """A question, and the boxed number at the end of its answer."""

    question: str
    result: int


@dataclass(frozen=True)
class Workload:
    """One task.

    Attributes:
        max_new_tokens: limit of an answer.
        max_total_tokens: limit of prompt and answer together.
        draw: draws a random problem.
        make_base: makes the model of a million parameters and returns its folder.
    """

    max_new_tokens: int
    max_total_tokens: int
    draw: Callable[[random.Random], Problem]
    make_base: Callable[[], Path]


def draw_sum(rng: random.Random) -> Problem:
    """Draw a sum of two two-digit numbers."""
    left, right = rng.randint(10, 99), rng.randint(10, 99)
    return Problem(f"{left}+{right}=", left + right)


def draw_count(rng: random.Random) -> Problem:
    """Draw a count of 1 to `MOST_STEPS` steps between two-digit numbers; k steps have a probability ~ 1/k."""
    choices = range(1, MOST_STEPS + 1)
    (steps,) = rng.choices(choices, weights=[1 / k for k in choices])
    first = rng.randint(10, 99 - steps)
    return Problem(f"{first}>{first + steps}=", steps)


def counted(problem: Problem) -> str:
    r"""Return the answer with its intermediate numbers.

    Example:
        >>> counted(Problem("37>40=", 3))
        '38 39 40 \\boxed{3}'
    """
    first = int(problem.question.partition(">")[0])
    numbers = [f"{first + step} " for step in range(1, problem.result + 1)]
    return f"{''.join(numbers)}\\boxed{{{problem.result}}}"


def make_skewed_base() -> Path:
    """Train the shipped model on counting, unless the result exists."""
    folder = BENCH / "skewed-1m"
    if not (folder / "model.safetensors").exists():
        logger.info("Training %s, %d steps ...", folder.name, SKEWED_RECIPE.steps)
        tokenizer, model = AutoTokenizer.from_pretrained(TINY_CHAT), _load(TINY_CHAT)

        def draw(_: int, rng: random.Random) -> list[tuple[str, str]]:
            problems = [draw_count(rng) for _ in range(SKEWED_RECIPE.batch_size)]
            return [(problem.question, counted(problem)) for problem in problems]

        train_on(model, tokenizer, SKEWED_RECIPE, draw)
        save_tiny_checkpoint(folder, model, tokenizer)
    return folder


WORKLOADS = {
    "uniform": Workload(64, 128, draw_sum, lambda: TINY_CHAT),
    "skewed": Workload(256, 320, draw_count, make_skewed_base),
}


def prompts_of(workload: str) -> list[dict[str, str]]:
    """Return rows `{"problem", "answer"}`."""
    rng = random.Random(PROMPT_SEED)
    problems = [WORKLOADS[workload].draw(rng) for _ in range(NUM_PROMPTS)]
    return [{"problem": problem.question, "answer": str(problem.result)} for problem in problems]


def find_model(workload: str, size: str) -> Path:
    """Return the folder of a model; make it if necessary."""
    base = WORKLOADS[workload].make_base()
    folder = BENCH / f"{workload}-{size}"
    if size == "1m":
        return base
    if not (folder / "model.safetensors").exists():
        save_tiny_checkpoint(folder, widen(_load(base), SIZES[size]), AutoTokenizer.from_pretrained(base))
    return folder


def _load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def widen(model: PreTrainedModel, shape: TinyShape) -> PreTrainedModel:
    """Build a larger Qwen2 with the same function: new weights are random, but none adds to the residual stream yet.

    Args:
        model: the small model, float32.
        shape: at least as large in every dimension, with the same number of query heads per key head.

    Returns:
        The large model. Its logits differ only by rounding. A stream padded with zeros to w times its width has an RMS
        smaller by sqrt(w), so `x / rms(x)` grows by sqrt(w); the norms' weights are divided by it.
    """
    wide = make_tiny_model("qwen2", shape)
    ratio = wide.config.hidden_size / model.config.hidden_size
    wide.config.rms_norm_eps = model.config.rms_norm_eps / ratio
    weights = wide.state_dict()
    for name in weights:
        if name.endswith(INTO_RESIDUAL):
            weights[name].zero_()
    for name, weight in model.state_dict().items():
        scale = ratio**-0.5 if name.endswith("norm.weight") else 1.0
        weights[name][tuple(map(slice, weight.shape))] = weight * scale
    return wide
