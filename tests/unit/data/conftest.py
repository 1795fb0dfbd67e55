"""Real tokenizers and data for the data tests; a test that needs them skips where they are absent."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

SHARED = Path(__file__).resolve().parents[3] / "../shared/data"


@pytest.fixture(scope="session")
def shared_data():
    if not SHARED.is_dir():
        pytest.skip("../shared/data is absent")
    return SHARED


@pytest.fixture(scope="session")
def minimind(shared_data):
    return AutoTokenizer.from_pretrained(shared_data / "tokenizers/minimind")


@pytest.fixture(scope="session")
def qwen3(shared_data):
    return AutoTokenizer.from_pretrained(shared_data / "tokenizers/qwen3")


@pytest.fixture(params=["minimind", "qwen3"])
def chat_tokenizer(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def bare_tokenizer():
    """A word tokenizer made here, with a passthrough template: no files needed."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(["<pad>", "</s>", *"0123456789+-= "])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made
