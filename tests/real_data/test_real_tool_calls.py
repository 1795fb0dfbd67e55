"""Calls of BFCL, rendered by each chat template, are read back as the same calls."""

import ast
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from nemo_rl.kits.tools.template import choose_parser, response_text
from nemo_rl.kits.tools.vllm import CallParser, ToolCall

CATEGORIES = ("simple_python", "multiple", "parallel", "parallel_multiple", "live_simple", "multi_turn_base")
TEMPLATES = {
    "minimind": ("minimind", "tokenizer_config.json"),
    "qwen3": ("qwen3", "tokenizer_config.json"),
    "qwen3-base": ("qwen3", "base.tokenizer_config.json"),
    "qwen2.5": ("qwen3", "qwen2.5.tokenizer_config.json"),
}


def lines(path: Path) -> Iterator[Any]:
    for line in gzip.decompress(path.read_bytes()).splitlines():
        yield json.loads(line)


def turns_of(category: str, folder: Path) -> list[list[ToolCall]]:
    """Return the calls of each turn: of several right values of an argument the first that is not empty."""
    turns: list[list[ToolCall]] = []
    for row in lines(folder / f"possible_answer/BFCL_v4_{category}.json.gz"):
        for entry in row["ground_truth"] if category == "multi_turn_base" else [row["ground_truth"]]:
            calls = [from_python(each) if isinstance(each, str) else from_options(each) for each in entry]
            if calls:
                turns.append(calls)
    return turns


def from_options(call: dict[str, Any]) -> ToolCall:
    ((name, options),) = call.items()
    chosen = {key: next((value for value in values if value != ""), None) for key, values in options.items()}
    return ToolCall(name, {key: value for key, value in chosen.items() if value is not None})


def from_python(text: str) -> ToolCall:
    node = ast.parse(text, mode="eval").body
    assert isinstance(node, ast.Call)
    positional = {f"argument_{number}": ast.literal_eval(value) for number, value in enumerate(node.args)}
    named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return ToolCall(ast.unparse(node.func), positional | named)


@pytest.fixture(scope="module", params=list(TEMPLATES))
def tokenizer(request: pytest.FixtureRequest, shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, config = TEMPLATES[request.param]
    copy = tmp_path_factory.mktemp(request.param)
    for file in (shared_data / "tokenizers" / folder).iterdir():
        if not file.name.endswith("tokenizer_config.json"):
            (copy / file.name).write_bytes(file.read_bytes())
    (copy / "tokenizer_config.json").write_bytes((shared_data / "tokenizers" / folder / config).read_bytes())
    return AutoTokenizer.from_pretrained(copy)


def test_calls_of_bfcl_are_read_back(tokenizer: Any, shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen, _ = choose_parser(None, tokenizer, [])
    parser = CallParser(chosen.name, tokenizer, [])
    question = {"role": "user", "content": "QUESTION"}
    prompt = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
    num_calls, wrong = 0, []
    for category in CATEGORIES:
        for calls in turns_of(category, shared_data / "bfcl"):
            written = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
            ]
            chat = [question, {"role": "assistant", "content": "", "tool_calls": written}]
            text = tokenizer.apply_chat_template(chat, tokenize=False)
            assert text.startswith(prompt)
            ids = tokenizer(text.removeprefix(prompt).rstrip("\n"), add_special_tokens=False)["input_ids"]
            found = parser.calls(response_text(ids, tokenizer))
            num_calls += len(calls)
            if found != calls:
                wrong.append((calls, found))
    with capsys.disabled():
        read = num_calls - sum(len(calls) for calls, _ in wrong)
        print(f"\n{chosen.name}: {read} of {num_calls} calls of BFCL are read back")  # noqa: T201
    assert num_calls > 2000
    assert wrong == []
