"""An answer to a request without thinking is its content, whatever the reasoning parser expects by default."""

import pytest
from transformers import AutoTokenizer

from nemo_rl.agents.endpoint.answers import AnswerReader
from nemo_rl.agents.endpoint.calls import CallRequest
from nemo_rl.config import REPOSITORY_ROOT
from nemo_rl.kits.tools.vllm import CallParser

TEXT = "The answer is 4."


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY_ROOT / "examples/assets/tiny-chat")
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return tokenizer


@pytest.mark.parametrize("name", ["qwen3", "glm45", "kimi_k2", "nemotron_v3"])
def test_the_request_says_whether_there_is_thinking(tokenizer, name):
    reader = AnswerReader(tokenizer, reasoning_parser=name)
    messages = [{"role": "user", "content": "2+2"}]
    off = CallRequest(messages=messages, template_kwargs={"enable_thinking": False})
    ids = tokenizer(f"{TEXT}<|im_end|>", add_special_tokens=False)["input_ids"]
    read = reader.read(ids, off, 0)
    assert (read.content, read.reasoning) == (TEXT, None)
    ids = tokenizer(f"<think>Two and two.</think>{TEXT}<|im_end|>", add_special_tokens=False)["input_ids"]
    read = reader.read(ids, CallRequest(messages=messages), 0)
    assert (read.content, read.reasoning) == (TEXT, "Two and two.")


@pytest.mark.parametrize("name", ["qwen3", "glm45", "kimi_k2", "nemotron_v3"])
def test_a_prompt_that_ends_the_thinking_needs_no_variable(tokenizer, name, monkeypatch):
    """A template may switch thinking off by a variable of its own (from a report about vLLM's parsers)."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
        "{{ '\n</think>\n\n' if effort == 'none' else '' }}{% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    reader = AnswerReader(tokenizer, reasoning_parser=name)
    messages = [{"role": "user", "content": "2+2"}]
    ids = tokenizer(f"{TEXT}<|im_end|>", add_special_tokens=False)["input_ids"]
    read = reader.read(ids, CallRequest(messages=messages, template_kwargs={"effort": "none"}), 0)
    assert (read.content, read.reasoning) == (TEXT, None)
    ids = tokenizer(f"Two and two.</think>{TEXT}<|im_end|>", add_special_tokens=False)["input_ids"]
    read = reader.read(ids, CallRequest(messages=messages), 0)
    assert read.content == TEXT


@pytest.mark.parametrize(("opening", "num_calls"), [("<think>\n", 0), ("<think>\n\n</think>\n\n", 1), ("", 1)])
def test_calls_in_thinking_that_the_prompt_opened_are_none(opening, num_calls):
    tools = AutoTokenizer.from_pretrained(REPOSITORY_ROOT / "examples/assets/tiny-tools")
    header = "<|im_start|>assistant\n"
    assert "<|im_start|>assistant" in tools.chat_template
    tools.chat_template = tools.chat_template.replace(
        "assistant\n' }}{% endif %}", f"assistant\n{opening}' }}}}{{% endif %}}"
    )
    prompt = tools.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith(header + opening)
    schema = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}},
    }
    parser = CallParser("pythonic", tools, [schema])
    call = "[add(a=1)]"
    assert len(parser.calls(call, {})) == num_calls
    assert len(parser.calls(call)) == 1  # a text that follows no prompt
    assert len(parser.calls(f"I could {call} here</think>{call}", {})) == 1
