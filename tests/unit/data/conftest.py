"""Tokenizers with real chat templates for the data tests."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

TOKENIZERS = Path(__file__).resolve().parents[2] / "assets/tokenizers"


@pytest.fixture(scope="session")
def minimind():
    return AutoTokenizer.from_pretrained(TOKENIZERS / "minimind")


@pytest.fixture(scope="session")
def qwen3_folder():
    return TOKENIZERS / "qwen3"


@pytest.fixture(scope="session")
def qwen3(qwen3_folder):
    return AutoTokenizer.from_pretrained(qwen3_folder)


@pytest.fixture(params=["minimind", "qwen3"])
def chat_tokenizer(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def bare_tokenizer():
    """Make a word tokenizer with a passthrough template; no files needed."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(["<pad>", "</s>", *"0123456789+-= "])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made
