"""Make `examples/assets/tiny-vision`: a small vision-language model that often overlooks a box when it counts.

It trains a small Qwen2.5-VL with plain supervised steps on the CPU: first on right counts of the pictures of the
`shapes` task, then on a mixture in which an answer may be one too small, more often for more boxes. Half of the sampled
answers are then right, so there is something to improve by reinforcement learning. Invariant: one seed gives one model;
the validation pictures of the task are never trained on.

    uv run python tools/make_tiny_vision_model.py --output examples/assets/tiny-vision
"""

import argparse
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tiny_models import save_tiny_checkpoint
from tiny_vision_models import TinyVisionShape, make_tiny_vision_model, make_vision_processor
from transformers import AutoModelForImageTextToText, PreTrainedModel, ProcessorMixin

from nemo_rl.data.datasets.arithmetic import TRAIN, VALIDATION
from nemo_rl.data.datasets.rows.shapes import QUESTION, ShapesRows

logger = logging.getLogger("make_tiny_vision_model")

NUM_VALIDATION = 256


@dataclass(frozen=True)
class Recipe:
    """Settings of the model's training.

    Attributes:
        seed: seed of weights, pictures and mistakes.
        num_pictures: different pictures to train on.
        clean_steps: optimizer steps on right counts.
        mixed_steps: optimizer steps on the mixture with mistakes.
        batch_size: pictures per step.
        learning_rate: peak of a short linear warm-up and a linear decay, AdamW.
        mixed_learning_rate: the same for the mixture, without decay.
        overlooked: shares of the mixture's answers that are one too small, for 1, 2, 3 and 4 boxes.
    """

    seed: int = 0
    num_pictures: int = 8000
    clean_steps: int = 1000
    mixed_steps: int = 80
    batch_size: int = 32
    learning_rate: float = 2e-3
    mixed_learning_rate: float = 1e-3
    overlooked: tuple[float, float, float, float] = (0.2, 0.4, 0.6, 0.8)


class Counter:
    """A model that counts boxes, with its processor.

    Args:
        model: the model.
        processor: its processor. All pictures have the size and question of the task, so that one prompt fits all.
        form: text of an answer, with {} for the number.
    """

    def __init__(self, model: PreTrainedModel, processor: ProcessorMixin, form: str = "{}") -> None:
        self.model = model
        self.processor = processor
        content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        blank = np.zeros((28, 28, 3), dtype=np.uint8)
        self.prompt = processor(text=[text], images=[blank], return_tensors="pt")["input_ids"]
        end = processor.tokenizer.eos_token
        answers = [processor.tokenizer(form.format(count) + end)["input_ids"] for count in range(5)]
        self.answers = torch.tensor(answers)
        self.digit_at = form.index("{}")

    def logits(self, pictures: np.ndarray, answers: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of the answer's tokens.

        Args:
            pictures: [B, height, width, 3] uint8.
            answers: [B, A] int64, ids of answers, or None.

        Returns:
            [B, A + 1, vocabulary] float32; [B, 1, vocabulary] without answers.
        """
        ids = self.prompt.expand(len(pictures), -1)
        ids = ids if answers is None else torch.cat([ids, answers], dim=1)
        return self.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == self.model.config.image_token_id).int(),
            use_cache=False,
            logits_to_keep=ids.shape[1] - self.prompt.shape[1] + 1,
            **self.processor.image_processor(list(pictures), return_tensors="pt"),
        ).logits


def draw(split: str, num_pictures: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures of the task, [N, height, width, 3] uint8, and their numbers of boxes, [N] int64."""
    rows = ShapesRows(split, num_pictures, seed, None)
    pictures, counts = zip(*(rows.draw(index) for index in range(num_pictures)), strict=True)
    return np.stack(pictures), np.array(counts)


def rate(step: int, recipe: Recipe) -> float:
    """Return the learning rate of a step, counted from 1."""
    left = step - recipe.clean_steps
    warm = min(1.0, (left if left > 0 else step) / 10)
    if left > 0:
        return recipe.mixed_learning_rate * warm
    return recipe.learning_rate * min(warm, 1 - (step - 1) / recipe.clean_steps)


def train(counter: Counter, recipe: Recipe) -> None:
    """Train the model: first on right counts, then on the mixture."""
    pictures, counts = draw(TRAIN, recipe.num_pictures, recipe.seed)
    rng = np.random.default_rng(recipe.seed)
    optimizer = torch.optim.AdamW(counter.model.parameters(), weight_decay=0.01)
    counter.model.train()
    for step in range(1, recipe.clean_steps + recipe.mixed_steps + 1):
        if step in (1, recipe.clean_steps + 1):
            optimizer.state.clear()
        optimizer.param_groups[0]["lr"] = rate(step, recipe)
        chosen = rng.integers(len(pictures), size=recipe.batch_size)
        said = counts[chosen]
        if step > recipe.clean_steps:
            said = said - (rng.random(recipe.batch_size) < np.array(recipe.overlooked)[said - 1])
        answers = counter.answers[torch.from_numpy(said)]
        logits = counter.logits(pictures[chosen], answers)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(counter.model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == 1:
            logger.info("step %d loss %.4f", step, loss.item())
    counter.model.eval()


@torch.no_grad()
def accuracy(counter: Counter, seed: int = 42) -> tuple[float, float]:
    """Return the share of right counts of held-out pictures: sampled at temperature 1 (expected value), and greedy.

    The text before the number is given.

    Args:
        counter: the model to measure.
        seed: seed of the pictures.
    """
    pictures, counts = draw(VALIDATION, NUM_VALIDATION, seed)
    answers = counter.answers[torch.from_numpy(counts)]
    shares = counter.logits(pictures, answers)[:, counter.digit_at].softmax(-1)
    right = answers[:, counter.digit_at]
    sampled = shares.gather(1, right[:, None]).mean().item()
    return sampled, (shares.argmax(-1) == right).float().mean().item()


def main() -> None:
    """Train, store in bfloat16, load in float32 and report the accuracy of the stored model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--clean-steps", type=int, default=Recipe.clean_steps)
    parser.add_argument("--mixed-steps", type=int, default=Recipe.mixed_steps)
    parser.add_argument("--form", default="{}", help="text of an answer, for example '<answer>{}</answer>'")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(arguments.threads)
    recipe = Recipe(arguments.seed, clean_steps=arguments.clean_steps, mixed_steps=arguments.mixed_steps)
    shape = TinyVisionShape()
    model = make_tiny_vision_model("qwen2_5_vl", shape, seed=recipe.seed)
    counter = Counter(model, make_vision_processor("qwen2_5_vl", shape), arguments.form)
    started = time.monotonic()
    train(counter, recipe)
    logger.info("trained in %.0f s", time.monotonic() - started)
    save_tiny_checkpoint(arguments.output, counter.model.to(torch.bfloat16), counter.processor)
    stored = AutoModelForImageTextToText.from_pretrained(arguments.output, dtype=torch.float32).eval()
    sampled, greedy = accuracy(Counter(stored, counter.processor, arguments.form))
    logger.info("held-out accuracy: sampled %.3f, greedy %.3f", sampled, greedy)


if __name__ == "__main__":
    main()
