r"""The workloads of the comparison with TRL: what is asked, how long an answer may be, and models that can answer.

`uniform`: sums of two numbers, answers of about the same length. `skewed`: sums of 2 to 20 numbers with running totals,
answers of 20 to 250 tokens whose mean is about a quarter of the longest.

Each has one model of a million parameters: `uniform` the shipped one, `skewed` that one trained further. The larger models are the same
function in more weights, so that every size gives answers of the same lengths. Invariant: one workload and size is one
folder with the same bytes on every machine, made on first use.
"""

import logging
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
MAX_TERMS = 20
TERMS_DECAY = 1.25
"""Sums of k+1 numbers are as frequent as k to minus this power."""
SKEWED_RECIPE = Recipe(clean_steps=400, mixed_steps=0, batch_size=16, learning_rate=2e-3)
INTO_RESIDUAL = ("embed_tokens.weight", "o_proj.weight", "down_proj.weight")
"""Weights whose output is added to the residual stream."""


@dataclass(frozen=True)
class Workload:
    """One task.

    Attributes:
        max_new_tokens: limit of an answer.
        max_total_tokens: limit of prompt and answer.
        draw: numbers of one sum.
        make_base: makes the folder of the model of a million parameters, and returns it.
    """

    max_new_tokens: int
    max_total_tokens: int
    draw: Callable[[random.Random], list[int]]
    make_base: Callable[[], Path]


def draw_terms(count: int, rng: random.Random) -> list[int]:
    """Numbers of two digits."""
    return [rng.randint(10, 99) for _ in range(count)]


def draw_many(rng: random.Random) -> list[int]:
    """2 to `MAX_TERMS` numbers, seldom many."""
    additions = range(1, MAX_TERMS)
    (count,) = rng.choices(additions, weights=[k**-TERMS_DECAY for k in additions])
    return draw_terms(count + 1, rng)


def running_totals(numbers: list[int]) -> str:
    r"""The answer with its working.

    Example:
        >>> running_totals([12, 34, 5])
        '12+34=46, 46+5=51, \\boxed{51}'
    """
    total, steps = numbers[0], []
    for number in numbers[1:]:
        steps.append(f"{total}+{number}={total + number}, ")
        total += number
    return f"{''.join(steps)}\\boxed{{{total}}}"


def problem_of(numbers: list[int]) -> str:
    """The question."""
    return "+".join(map(str, numbers)) + "="


def make_skewed_base() -> Path:
    """Train the shipped model on sums with running totals, unless that has been done."""
    folder = BENCH / "skewed-1m"
    if not (folder / "model.safetensors").exists():
        logger.info("Training %s, %d steps ...", folder.name, SKEWED_RECIPE.steps)
        tokenizer, model = AutoTokenizer.from_pretrained(TINY_CHAT), _load(TINY_CHAT)

        def draw(_: int, rng: random.Random) -> list[tuple[str, str]]:
            count = rng.randint(2, MAX_TERMS)  # of a step's rows, so that they need little padding
            sums = [draw_terms(count, rng) for _ in range(SKEWED_RECIPE.batch_size)]
            return [(problem_of(numbers), running_totals(numbers)) for numbers in sums]

        train_on(model, tokenizer, SKEWED_RECIPE, draw)
        save_tiny_checkpoint(folder, model, tokenizer)
    return folder


WORKLOADS = {
    "uniform": Workload(64, 128, partial(draw_terms, 2), lambda: TINY_CHAT),
    "skewed": Workload(256, 384, draw_many, make_skewed_base),
}


def prompts_of(workload: str) -> list[dict[str, str]]:
    """Rows `{"problem", "answer"}`."""
    rng = random.Random(PROMPT_SEED)
    sums = map(WORKLOADS[workload].draw, [rng] * NUM_PROMPTS)
    return [{"problem": problem_of(numbers), "answer": str(sum(numbers))} for numbers in sums]


def find_model(workload: str, size: str) -> Path:
    """The folder of a model."""
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
    """The same function in a larger Qwen2: new weights are random, but none adds to the residual stream yet.

    Args:
        model: the small one, float32.
        shape: at least as large in everything, with as many query heads for each key head.

    Returns:
        The large one. Its logits differ by rounding only: `x / rms(x)` over a stream that zeros fill up to a width
        w times as large is sqrt(w) times what it was, hence the norms' weights are divided by that.
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
