"""Tiny models that read images, rows for them, and the log-probabilities of transformers in float64."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from generation_helpers import spread_out
from PIL import Image as Pictures
from tiny_models import save_tiny_checkpoint
from tiny_vision_models import TinyVisionShape, make_tiny_vision_model, make_vision_processor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from nemo_rl.config import TokenizerConfig
from nemo_rl.data.images.messages import images_of
from nemo_rl.data.interfaces import TaskDataSpec, TokenizerType
from nemo_rl.data.model_rows import RowInputs, forward_arguments, row_positions
from nemo_rl.data.processors import vlm_hf_data_processor
from nemo_rl.data.tokenizer import get_tokenizer

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm")
SPEC = TaskDataSpec("images")


def make_folder(folder: Path, family: str, *, seed: int = 3, split_images: bool = False) -> str:
    """Save a random model whose next-token distributions are far from uniform."""
    shape = TinyVisionShape(split_images=split_images)
    model = spread_out(make_tiny_vision_model(family, shape, seed=seed), seed)
    save_tiny_checkpoint(folder, model, make_vision_processor(family, shape))
    return str(folder)


def tokenizer_of(folder: str) -> TokenizerType:
    return get_tokenizer(TokenizerConfig.build(name=folder, use_processor=True))


def picture(width: int, height: int, seed: int = 0) -> Pictures.Image:
    values = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Pictures.fromarray(values)


def question(text: str, *pictures: Any) -> dict[str, Any]:
    parts = [{"type": "image", "image": each} for each in pictures] + [{"type": "text", "text": text}]
    return {"role": "user", "content": parts}


def row_of(*messages: dict[str, Any], answer: str = "3") -> dict[str, Any]:
    return {"messages": [*messages, {"role": "assistant", "content": answer}], "task_name": "images"}


SMALL, WIDE, OTHER = picture(28, 28), picture(70, 43, seed=1), picture(28, 28, seed=2)
ROWS = {
    "text": row_of(question("Hello")),
    "one image": row_of(question("How many?", SMALL)),
    "two images": row_of(question("Which one?", SMALL, WIDE)),
    "two turns": row_of(question("One?", WIDE), {"role": "assistant", "content": "1"}, question("And now?", SMALL)),
}


def prompt(row: dict[str, Any], tokenizer: TokenizerType, longest: int = 400) -> tuple[list[int], RowInputs]:
    """Return the token ids and the further inputs of a row's prompt."""
    datum = vlm_hf_data_processor(row, SPEC, tokenizer, longest, 0)
    assert datum["loss_multiplier"] == 1.0
    return datum["message_log"][0]["token_ids"].tolist(), datum["row_inputs"]


def exact_model(folder: str) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64).eval()


def exact_logprobs(
    model: PreTrainedModel, ids: Sequence[int], inputs: RowInputs, never: Sequence[int] = (), *, grad: bool = False
) -> torch.Tensor:
    """Return the log-probabilities of the tokens of one row, `[n - 1]` float64, without tokens that are never drawn."""
    tokens = torch.tensor(ids)
    arguments = {k: v.double() if v.is_floating_point() else v for k, v in forward_arguments([inputs]).items()}
    positions = row_positions(tokens, inputs)
    positions = positions[None] if positions.dim() == 1 else positions[:, None]
    with torch.set_grad_enabled(grad):
        output = model(input_ids=tokens[None], position_ids=positions, use_cache=False, **arguments)
    logits = output.logits[0, :-1].double()
    targets = tokens[1:, None]
    banned = torch.zeros_like(logits, dtype=torch.bool)
    banned[:, list(never)] = True
    banned.scatter_(1, targets, False)
    logits = logits.masked_fill(banned, -torch.inf)
    return logits.log_softmax(-1).gather(1, targets)[:, 0]


def never_drawn(tokenizer: TokenizerType) -> tuple[int, ...]:
    family = images_of(tokenizer)
    assert family is not None
    return family.never_sampled
