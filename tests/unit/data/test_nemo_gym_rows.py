"""Rows of NeMo Gym: the prompt that is made of them, and rows that cannot be used."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from nemo_rl.data.bad_rows import RowError
from nemo_rl.data.datasets.nemo_gym import prompt_messages
from nemo_rl.data.datasets.response_datasets import load_response_dataset
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.processors import nemo_gym_data_processor
from nemo_rl.utils.errors import DataError

AGENT = {"type": "responses_api_agents", "name": "calculator_agent"}
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOL = {"type": "function", "name": "calculator", "description": "Calculates.", "parameters": SCHEMA, "strict": True}
CALL = {"type": "function_call", "name": "calculator", "arguments": "{}", "call_id": "c"}


def row(given: Any, **parameters: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": given, **parameters}, "agent_ref": AGENT, "tools": "its own"}


def test_messages_are_those_of_the_first_request() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": parts},
        {"type": "reasoning", "summary": []},
        CALL,
        CALL,
        {"type": "function_call_output", "call_id": "c", "output": "4"},
    ]
    call = {"type": "function", "function": {"name": "calculator", "arguments": "{}"}}
    assert prompt_messages(row(items, instructions="Help.")) == [
        {"role": "system", "content": "Help."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "4"},
    ]
    assert prompt_messages(row("2+2")) == [{"role": "user", "content": "2+2"}]


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"responses_create_params": {"input": "x"}},
        {"responses_create_params": {"input": "x"}, "agent_ref": "calculator_agent"},
        {"responses_create_params": {"input": "x"}, "agent_ref": {"name": ""}},
        {"responses_create_params": "x", "agent_ref": AGENT},
        row(None),
        row([]),
        row(5),
        row(["x"]),
        row([{"role": "alien", "content": "x"}]),
        row([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        row([{"type": "web_search_call"}]),
        row("x", tools="calculator"),
        row("x", tools=[{"type": "web_search"}]),
    ],
)
def test_rows_that_cannot_be_used_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RowError):
        prompt_messages(wrong)


def test_a_file_gives_prompts_with_tools_and_the_whole_row(tmp_path: Path) -> None:
    rows = [row("2+2", tools=[TOOL], temperature=0.5), {"broken": True}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    entry = {"dataset_name": "NemoGymDataset", "data_path": str(path), "env_name": "nemo_gym"}
    raw = load_response_dataset({**entry, "processor": "nemo_gym_data_processor"})
    assert len(raw.dataset) == 1 and [bad.line for bad in raw.bad_rows] == [2]
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).resolve().parents[2] / "assets/tokenizers/qwen3")
    datum = nemo_gym_data_processor(raw.dataset[0], TaskDataSpec("nemo_gym"), tokenizer, 4000, 0)
    assert datum["task_name"] == "nemo_gym" and datum["extra_env_info"]["gym_row"] == rows[0]
    text = datum["message_log"][0]["content"]
    assert "2+2" in text and '"calculator"' in text and "strict" not in text
    with pytest.raises(DataError, match="nemo_gym_data_processor"):
        load_response_dataset(entry)


def test_texts_that_the_agent_would_not_get_are_refused(tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("Be brief.")
    spec = TaskDataSpec("nemo_gym", system_prompt_file=tmp_path / "system.txt")
    given = {"messages": [{"role": "user", "content": "x"}], "extra_env_info": {"gym_row": {}}}
    with pytest.raises(DataError, match="their agents make the prompts"):
        nemo_gym_data_processor(given, spec, None, None, 0)
