"""vLLM's parsers read what chat templates write; a parser that does not is refused before a run."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.kits.tools.found import find_tools
from nemo_rl.kits.tools.interfaces import spec_of
from nemo_rl.kits.tools.template import choose_parser, looks_like_a_call, rendered_calls, response_text
from nemo_rl.kits.tools.vllm import CallParser, ReasoningReader, ToolCall
from nemo_rl.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[4]
TOKENIZERS = ROOT / "tests/assets/tokenizers"
CALCULATOR = find_tools("calculator", {}, "it").specs["calculator"].schema


@pytest.fixture(scope="module", params=["qwen3", "minimind"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return AutoTokenizer.from_pretrained(TOKENIZERS / request.param)


@pytest.fixture(scope="module")
def tiny() -> Any:
    return AutoTokenizer.from_pretrained(ROOT / "examples/assets/tiny-tools")


def test_the_parser_follows_from_the_chat_template(tokenizer: Any, tiny: Any) -> None:
    parser, opening = choose_parser(None, tokenizer, [CALCULATOR])
    assert (parser.name, opening) == ("hermes", "<tool_call>")
    parser, opening = choose_parser(None, tiny, [CALCULATOR])
    assert (parser.name, opening) == ("pythonic", "[")


def test_a_parser_that_does_not_read_the_template_is_refused_with_those_that_do(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="tool_parser=pythonic does not read") as caught:
        choose_parser("pythonic", tokenizer, [CALCULATOR])
    assert "Parsers that do: ernie45, granite4, hermes" in str(caught.value)
    with pytest.raises(ConfigError, match="tool_parser='hermess' is unknown. Did you mean 'hermes'"):
        choose_parser("hermess", tokenizer, [CALCULATOR])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not write the tools calculator, probe_tool"),
        ("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", "does not write the calls"),
        (
            "{{ tools }}{% for m in messages if m.role != 'tool' %}{{ m.content }}{{ m.tool_calls }}{% endfor %}",
            "leaves out messages of the role 'tool'",
        ),
    ],
)
def test_a_template_without_tools_is_refused(template: str, complaint: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZERS / "minimind")
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match="chat template") as caught:
        rendered_calls(tokenizer, [CALCULATOR])
    assert complaint in str(caught.value)


def test_calls_of_a_response_are_read(tokenizer: Any) -> None:
    parser = CallParser("hermes", tokenizer, [CALCULATOR])
    one = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'
    other = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    assert parser.calls(f"Let me see. {one}\n{other}") == [
        ToolCall("calculator", {"expression": "1+1"}),
        ToolCall("search", {}),
    ]
    for broken in (one.replace("}}", "}"), "<tool_call>", "no call", '<tool_call>{"name": 3}</tool_call>'):
        assert parser.calls(broken) == []
    assert parser.calls('<tool_call>{"name": "calculator", "arguments": [1]}</tool_call>') == [
        ToolCall("calculator", None)
    ]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("text", "opening", "found"),
    [
        ("<tool_call>{", "<tool_call>", True),
        ("an answer", "<tool_call>", False),
        ('[calculator(expression="1"', "[", True),
        ("the interval [1, 2]", "[", False),
        ("anything", "", False),
    ],
)
def test_a_broken_call_is_told_from_an_answer(text: str, opening: str, found: bool) -> None:
    assert looks_like_a_call(text, opening, {"calculator": None}) == found


@pytest.mark.fast
def test_special_tokens_stay_but_for_those_at_the_end() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZERS / "qwen3")
    ids = tokenizer("<|im_start|>a<|im_end|><|endoftext|>")["input_ids"]
    assert response_text(ids, tokenizer) == "<|im_start|>a"


@pytest.mark.fast
def test_the_calculators_schema_is_what_its_docstring_says() -> None:
    function = CALCULATOR["function"]
    assert function["name"] == "calculator"
    assert function["parameters"]["required"] == ["expression"]
    assert spec_of(find_tools("calculator", {}, "it").found, "it").schema == CALCULATOR


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'
TAGGED = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "a</think>"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "expressions"),
    [
        (f"<think>I could write {CALL}.</think>It is 2.", []),
        (f"I could write {CALL}.</think>It is 2.", []),  # the prompt has opened the thinking
        (f"<think>I could write {CALL}.", []),
        (f"<think>Two.</think>{CALL}", ["1+1"]),
        (f"<think>{CALL}</think>{CALL}", ["1+1"]),
        (f"<think>Two.</think>{TAGGED}", ["a</think>"]),
        (f"{TAGGED}\n{CALL}", ["a</think>", "1+1"]),
        (CALL, ["1+1"]),
    ],
)
def test_calls_in_thinking_text_are_none(tokenizer: Any, text: str, expressions: list[str]) -> None:
    parser = CallParser("hermes", tokenizer, [CALCULATOR])
    assert parser.calls(text) == [ToolCall("calculator", {"expression": one}) for one in expressions]
    content = parser.content_and_calls(text)[0]
    thought = text[: text.index("</think>") + 8] if text.startswith("<think>") and expressions else ""
    assert content.rstrip() == (thought if expressions else text)


@pytest.mark.parametrize("name", ["qwen3", "glm45", "kimi_k2", "nemotron_v3", "deepseek_v3"])
def test_reasoning_parsers_know_whether_the_template_lets_the_model_think(tmp_path: Path, name: str) -> None:
    off = {"thinking": False} if name == "deepseek_v3" else {"enable_thinking": False}
    on = dict.fromkeys(off, True)
    made = AutoTokenizer.from_pretrained(TOKENIZERS / "minimind")
    made.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    made.save_pretrained(tmp_path)
    reader = ReasoningReader(name, get_tokenizer({"name": str(tmp_path)}))
    bound = ReasoningReader(name, get_tokenizer({"name": str(tmp_path), "chat_template_kwargs": off}))
    for text, variables, parts in (
        ("The answer is 4.", off, (None, "The answer is 4.")),
        ("It is even.</think>The answer is 4.", on, ("It is even.", "The answer is 4.")),
        ("<think>It is even.</think>The answer is 4.", on, ("It is even.", "The answer is 4.")),
    ):
        assert reader.split(text, variables) == parts
        assert bound.split(text, variables) == parts  # those of the request replace the tokenizer's
    assert bound.split("The answer is 4.") == (None, "The answer is 4.")
