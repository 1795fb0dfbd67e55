"""Tiny models and tokenizers, and the one shipped for the quick start."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import (
    TinyShape,
    make_char_tokenizer,
    make_tiny_model,
    save_tiny_checkpoint,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
ASSET = ROOT / "examples/assets/tiny-chat"
SMALL = TinyShape(hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1)

TOKENIZER = make_char_tokenizer()


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_is_decoded_unchanged(text):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == text
    assert "<|" in text or len(ids) == len(text.encode("utf-8", errors="surrogatepass"))


def test_the_chat_prompt_has_the_expected_tokens():
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2="}]
    text = TOKENIZER.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == ("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n")
    ids = TOKENIZER(text)["input_ids"]
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id) == (256, 258)
    assert [i for i in ids if i >= 256] == [257, 258, 257, 258, 257]
    assert len(ids) == 5 + len("system\nAdd.\nuser\n1+2=\nassistant\n")


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_models_are_reproducible_and_leave_the_random_state(arch):
    before = torch.random.get_rng_state()
    first, second, other = (make_tiny_model(arch, SMALL, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
    assert not torch.equal(first.get_input_embeddings().weight, other.get_input_embeddings().weight)
    assert first.config.model_type == arch
    assert first.get_output_embeddings().weight is first.get_input_embeddings().weight
    assert first(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 264)


def test_shape_and_arch_are_checked():
    untied = make_tiny_model("qwen3", TinyShape(hidden_size=64, num_heads=2, num_kv_heads=1, tie_embeddings=False))
    assert untied.config.head_dim == 32
    assert untied.get_output_embeddings().weight is not untied.get_input_embeddings().weight
    with pytest.raises(ConfigError, match=r"gpt9.*llama"):
        make_tiny_model("gpt9")
    with pytest.raises(ConfigError, match="num_kv_heads=3"):
        make_tiny_model("qwen2", TinyShape(num_kv_heads=3))


def test_a_checkpoint_round_trip_keeps_model_and_tokenizer(tmp_path):
    model = make_tiny_model("qwen2", SMALL, dtype=torch.bfloat16)
    save_tiny_checkpoint(tmp_path, model, TOKENIZER)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).float())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    assert tokenizer.chat_template == TOKENIZER.chat_template
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.fixture(scope="module")
def script():
    """Load `tools/make_tiny_chat_model.py` as a module."""
    spec = importlib.util.spec_from_file_location("make_tiny_chat_model", ROOT / "tools/make_tiny_chat_model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_worked_answers_are_correct_and_slips_are_wrong(script):
    rng = script.random.Random(0)
    assert script.worked_answer(37, 85, None, rng) == "7+5=12, 3+8+1=12, \\boxed{122}"
    assert script.worked_answer(12, 34, None, rng) == "2+4=6, 1+3=4, \\boxed{46}"
    for left in range(10, 100):
        for right in range(10, 100, 7):
            assert script.worked_answer(left, right, None, rng).endswith(f" \\boxed{{{left + right}}}")
            for slip in ("units", "carry", "copy"):
                assert not script.worked_answer(left, right, slip, rng).endswith(f" \\boxed{{{left + right}}}")


def test_the_mixture_has_the_share_of_wrong_answers_of_the_recipe(script):
    recipe, rng = script.Recipe(), script.random.Random(1)
    problems = script.all_problems(held_out=False)
    drawn = rng.choices(problems, k=20_000)
    right = sum(script.sample_target(a, b, recipe, rng).endswith(f"\\boxed{{{a + b}}}") for a, b in drawn)
    assert right / len(drawn) == pytest.approx((1 - recipe.hasty_share) * (1 - recipe.slip_share), abs=0.015)


def test_training_and_validation_problems_are_disjoint(script):
    trained = {tuple(sorted(problem)) for problem in script.all_problems(held_out=False)}
    measured = {tuple(sorted(problem)) for problem in script.all_problems(held_out=True)}
    assert not trained & measured
    assert len(trained) + len(measured) == 90 * 91 // 2


@pytest.mark.long
def test_the_shipped_model_is_small_and_of_medium_accuracy(script):
    assert sum(file.stat().st_size for file in ASSET.iterdir()) < 4 * 2**20
    model = AutoModelForCausalLM.from_pretrained(ASSET, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(ASSET)
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    share, length = script.accuracy(model, tokenizer, temperature=1.0)
    assert 0.30 <= share <= 0.50
    assert length < 40
