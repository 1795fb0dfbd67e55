"""Tiny vision-language models: genuine folders whose processors and models load offline and fit each other."""

import pytest
import torch
from tiny_models import save_tiny_checkpoint
from tiny_vision_models import TinyVisionShape, make_tiny_vision_model, make_vision_processor
from transformers import AutoModelForImageTextToText, AutoProcessor

from nemo_rl.utils.errors import ConfigError

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
    assert model.config.model_type == arch and model.num_parameters() < 400_000
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
