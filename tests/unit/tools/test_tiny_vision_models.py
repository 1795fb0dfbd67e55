"""Tiny vision-language models: genuine folders whose processors and models load offline and fit each other."""

from pathlib import Path

import pytest
import torch
from make_tiny_vision_model import Counter, Recipe, accuracy, rate
from tiny_models import save_tiny_checkpoint
from tiny_vision_models import TinyVisionShape, make_tiny_vision_model, make_vision_processor
from transformers import AutoModelForImageTextToText, AutoProcessor

from nemo_rl.utils.errors import ConfigError

ASSET = Path(__file__).resolve().parents[3] / "examples/assets/tiny-vision"

pytest.importorskip("torchvision")
pytest.importorskip("num2words")

QUESTION = [
    {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Which?"}]},
]
TEXTS = {
    "qwen": "<|im_start|>user\n" + 2 * "<|vision_start|><|image_pad|><|vision_end|>" + "Which?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "idefics": "<|im_start|>User:<image><image>Which?<end_of_utterance>\nAssistant:",
}
CASES = {
    "qwen2_5_vl": ("qwen2_5_vl", False, 4 + 12),
    "qwen3_vl": ("qwen3_vl", False, 4 + 12),
    "idefics3": ("idefics3", False, 4 + 4),
    "idefics3 with tiles": ("idefics3", True, 5 * 4 + 5 * 4),
    "smolvlm": ("smolvlm", False, 4 + 4),
    "smolvlm with tiles": ("smolvlm", True, 5 * 4 + 5 * 4),
}


def pictures(sizes, seed=0):
    """Return pictures of random pixels, [3, height, width] uint8."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (3, *size), generator=generator, dtype=torch.uint8) for size in sizes]


@pytest.mark.parametrize("case", CASES)
def test_a_folder_loads_and_its_model_sees_the_images(tmp_path, case):
    arch, split_images, num_image_tokens = CASES[case]
    shape = TinyVisionShape(split_images=split_images)
    save_tiny_checkpoint(tmp_path, make_tiny_vision_model(arch, shape), make_vision_processor(arch, shape))
    processor = AutoProcessor.from_pretrained(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert model.config.model_type == arch and model.num_parameters() < 450_000
    assert model.config.get_text_config().vocab_size == len(processor.tokenizer)
    assert model.generation_config.eos_token_id == processor.tokenizer.eos_token_id
    text = processor.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert text == TEXTS["qwen" if "qwen" in arch else "idefics"]
    sizes = [(28, 28), (42, 56)]
    inputs = processor(text=[text], images=pictures(sizes), return_tensors="pt")
    assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == num_image_tokens
    others = processor(text=[text], images=pictures(sizes, seed=1), return_tensors="pt")
    logits = [model(**given).logits.log_softmax(-1)[0, -1] for given in (inputs, others)]
    assert (logits[0] - logits[1]).abs().max() > 0.05, "another image changes the next token"


@pytest.mark.parametrize("arch", ["qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm"])
def test_the_same_arguments_give_the_same_bytes(tmp_path, arch):
    for name in ("first", "second"):
        save_tiny_checkpoint(tmp_path / name, make_tiny_vision_model(arch, seed=5), make_vision_processor(arch))
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("first", "second")]
    assert files[0] == files[1] and "model.safetensors" in files[0]


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ConfigError, match=r"gpt9.*idefics3.*qwen2_5_vl"):
        make_tiny_vision_model("gpt9")


def test_the_learning_rate_warms_up_in_both_parts():
    recipe = Recipe(clean_steps=20, mixed_steps=15, learning_rate=2.0, mixed_learning_rate=1.0)
    rates = [rate(step, recipe) for step in range(1, 36)]
    assert rates[0] == 0.2 and rates[9] == 1.1 and rates[19] == pytest.approx(0.1)
    assert rates[20] == 0.1 and rates[29:] == [1.0] * 6


def test_the_shipped_model_is_small_and_overlooks_boxes():
    assert sum(file.stat().st_size for file in ASSET.iterdir()) < 2**20
    processor = AutoProcessor.from_pretrained(ASSET)
    model = AutoModelForImageTextToText.from_pretrained(ASSET, dtype=torch.float32).eval()
    made = make_vision_processor("qwen2_5_vl")
    assert processor.tokenizer.get_vocab() == made.tokenizer.get_vocab()
    assert processor.chat_template == made.chat_template
    assert processor.image_processor.to_dict() == made.image_processor.to_dict()
    sampled, greedy = accuracy(Counter(model, processor))
    assert 0.40 <= sampled <= 0.55 and 0.40 <= greedy <= 0.60
