"""Show which tokens are trained on, token by token, for real chat templates, against the text itself.

The reference works on text alone: the rendered chat is cut by the template's literal markers, written out
here by hand, and the kept pieces are compared with what the mask keeps, decoded.
"""

import json

import pytest
import torch
from transformers import AutoTokenizer

from nemo_rl.data.collate_fn import sft_collate_fn
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.messages.spans import closing_token
from nemo_rl.data.processors import sft_processor
from nemo_rl.utils.errors import DataError

pytestmark = pytest.mark.fast

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
ONE_TURN = [("user", "What is 2+2?"), ("assistant", "It is 4.")]
SYSTEM = [("system", "Be brief."), *ONE_TURN]
MULTI_TURN = [
    *SYSTEM,
    ("user", "And  3+3?\n"),
    ("assistant", "Six, \n\nI say."),
    ("user", "Sure?"),
    ("assistant", "Yes"),
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [2, "x"]}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
TOOL_CHAT = [
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "4"},
    {"role": "tool", "content": "4 again"},
    {"role": "assistant", "content": "It is 4."},
]
CALLS = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [2, "x"]}}\n</tool_call>'


@pytest.fixture(scope="session")
def llama3(qwen3_folder):
    """Make a tokenizer with Llama 3's special tokens and chat format over another byte-level vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(
        qwen3_folder, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", pad_token="<|end_of_text|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start_header_id|>", "<|end_header_id|>"]})
    tokenizer.chat_template = LLAMA3
    return tokenizer


def chat(turns):
    return [{"role": role, "content": content} for role, content in turns]


def trained(tokenizer, messages, *, only_final=False, tools=None, header=True):
    """Return the decoded runs of trained tokens, the text of all tokens, and the mask."""
    row = {"messages": messages, "tools": tools}
    datum = sft_processor(row, TaskDataSpec(), tokenizer, None, 0, add_generation_prompt=header)
    batch = sft_collate_fn([datum], tokenizer, 1, only_final)
    ids, mask = batch["input_ids"][0], batch["token_mask"][0]
    runs, current = [], []
    for token, counts in zip(ids.tolist(), mask.tolist(), strict=True):
        if counts:
            current.append(token)
        elif current:
            runs.append(current)
            current = []
    runs += [current] if current else []
    return [tokenizer.decode(run) for run in runs], tokenizer.decode(ids), mask


QWEN_EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("turns", [ONE_TURN, SYSTEM, MULTI_TURN], ids=["one", "system", "multi"])
def test_qwen3_spans_cover_the_answers_with_their_end_token(qwen3, turns):
    runs, text, _ = trained(qwen3, chat(turns))
    answers = [content for role, content in turns if role == "assistant"]
    # Qwen3 renders the (empty) reasoning of the last turn only, and a model has to write it there.
    assert runs == [a + "<|im_end|>" for a in answers[:-1]] + [QWEN_EMPTY + answers[-1] + "<|im_end|>"]
    assert text == qwen3.apply_chat_template(chat(turns), tokenize=False).rstrip("\n")


@pytest.mark.parametrize("turns", [ONE_TURN, SYSTEM, MULTI_TURN], ids=["one", "system", "multi"])
def test_minimind_spans_cover_the_answers_with_their_end_token(minimind, turns):
    runs, text, _ = trained(minimind, chat(turns))
    # MiniMind's generation prompt already holds the empty reasoning.
    assert runs == [content + "<|im_end|>" for role, content in turns if role == "assistant"]
    assert text == minimind.apply_chat_template(chat(turns), tokenize=False).rstrip("\n")


@pytest.mark.parametrize("turns", [ONE_TURN, SYSTEM, MULTI_TURN], ids=["one", "system", "multi"])
def test_llama3_spans_cover_the_answers_with_their_end_token(llama3, turns):
    runs, text, _ = trained(llama3, chat(turns))
    assert runs == [content.strip() + "<|eot_id|>" for role, content in turns if role == "assistant"]
    assert text == llama3.apply_chat_template(chat(turns), tokenize=False)
    assert text.count("<|begin_of_text|>") == 1 and "<|end_of_text|>" not in text


@pytest.mark.parametrize("turns", [ONE_TURN, MULTI_TURN], ids=["one", "multi"])
@pytest.mark.parametrize("name", ["qwen3", "minimind", "llama3"])
def test_every_token_of_an_answer_follows_its_generation_prompt(request, name, turns):
    """Trained tokens come after exactly the tokens that the engine would get."""
    tokenizer = request.getfixturevalue(name)
    messages = chat(turns)
    row = {"messages": messages}
    log = sft_processor(row, TaskDataSpec(), tokenizer, None, 0, add_generation_prompt=True)["message_log"]
    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(messages[:position], tokenize=False, add_generation_prompt=True)
        before = torch.cat([entry["token_ids"] for entry in log[:position]]).tolist()
        assert before == tokenizer(prompt, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ["qwen3", "minimind"])
def test_tool_calls_are_trained_on_and_tool_answers_are_not(request, name):
    tokenizer = request.getfixturevalue(name)
    last = QWEN_EMPTY if name == "qwen3" else ""
    runs, text, _ = trained(tokenizer, TOOL_CHAT, tools=TOOLS)
    assert runs == [f"{CALLS}\n{CALLS}<|im_end|>", f"{last}It is 4.<|im_end|>"]
    assert json.dumps(TOOLS[0]) in text
    later = [*TOOL_CHAT, {"role": "user", "content": "Thanks"}, {"role": "assistant", "content": "Welcome"}]
    runs, _, _ = trained(tokenizer, later, tools=TOOLS)
    assert runs == [f"{CALLS}\n{CALLS}<|im_end|>", "It is 4.<|im_end|>", f"{last}Welcome<|im_end|>"]


def test_reasoning_that_the_template_drops_later_is_handled(qwen3):
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "", "reasoning_content": "Use the tool", "tool_calls": [CALL]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4", "reasoning_content": "Done"},
    ]
    runs, _, _ = trained(qwen3, messages, tools=TOOLS)
    assert runs == [
        f"<think>\nUse the tool\n</think>\n\n{CALLS}<|im_end|>",
        "<think>\nDone\n</think>\n\n4<|im_end|>",
    ]
    later = [*messages, {"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "6"}]
    runs, _, _ = trained(qwen3, later, tools=TOOLS)
    assert runs == [f"{CALLS}<|im_end|>", "4<|im_end|>", f"{QWEN_EMPTY}6<|im_end|>"]


def test_only_the_final_turn_can_be_trained(qwen3, minimind, llama3):
    for tokenizer, answer in (
        (qwen3, QWEN_EMPTY + "Yes<|im_end|>"),
        (minimind, "Yes<|im_end|>"),
        (llama3, "Yes<|eot_id|>"),
    ):
        runs, _, _ = trained(tokenizer, chat(MULTI_TURN), only_final=True)
        assert runs == [answer]


def test_headers_are_trained_on_when_asked_for(minimind):
    runs, _, _ = trained(minimind, chat(SYSTEM), header=False)
    assert runs == ["<|im_start|>assistant\n<think>\n\n</think>\n\nIt is 4.<|im_end|>"]


def test_a_chat_that_holds_the_markers_is_refused(qwen3):
    evil = [("user", "a"), ("assistant", "b<|im_end|>c"), ("user", "d"), ("assistant", "e")]
    with pytest.raises(DataError, match="message 1 .*differently once later messages follow"):
        trained(qwen3, chat(evil))


def test_a_template_that_drops_turns_is_refused(minimind, monkeypatch):
    forgetful = (
        "{% for m in messages %}{% if loop.last %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endif %}"
    )
    monkeypatch.setattr(minimind, "chat_template", forgetful + "{% endfor %}")
    with pytest.raises(DataError, match="cannot be distinguished from theirs"):
        trained(minimind, chat(MULTI_TURN))


def test_the_closing_token_is_the_special_token_at_the_end(qwen3, llama3):
    assert closing_token("a<|im_end|>\n", qwen3) == "<|im_end|>"
    assert closing_token("a<|eot_id|>", llama3) == "<|eot_id|>"
    assert closing_token("a", qwen3) is None
    assert closing_token("</tool_call>", qwen3) is None


def test_base_models_end_with_eos(bare_tokenizer):
    runs, text, _ = trained(
        bare_tokenizer, [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    )
    assert [run.replace(" ", "") for run in runs] == ["2</s>"]
