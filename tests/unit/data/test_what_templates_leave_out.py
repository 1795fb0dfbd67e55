"""Everything that a row holds is found in its rendered chat, or the row is refused, or a key allows the loss."""

import logging

import pytest
from chat_templates import TEMPLATES, make_tokenizer
from data_helpers import write_lines
from transformers import AutoTokenizer

from nemo_rl.config import DatasetConfig, SupervisedDataConfig
from nemo_rl.data.collate_fn import sft_collate_fn
from nemo_rl.data.datasets.response_datasets import load_response_dataset
from nemo_rl.data.datasets.setup import setup_sft_data
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.messages import coverage
from nemo_rl.data.messages.encoding import render_chat
from nemo_rl.data.messages.observations import ObservationRenderer
from nemo_rl.data.messages.template_form import arguments_form
from nemo_rl.data.processors import math_hf_data_processor, sft_processor
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.utils.errors import DataError

pytestmark = pytest.mark.fast

CALL = {"id": "call00001", "type": "function", "function": {"name": "find", "arguments": {"query": 'a\n"b" é', "n": 3}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds things.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string", "description": "What to find"}}},
    },
}
ASK = {"role": "user", "content": "Find a river."}
CALLING = [
    ASK,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "Tiber", "tool_call_id": "call00001"},
    {"role": "assistant", "content": "It is the Tiber."},
]
WRITES_TOOLS = ("chatml", "llama3", "mistral", "qwen3", "qwen3_no_thinking", "glm", "deepseek", "kimi")


@pytest.fixture(autouse=True)
def forget_reports():
    coverage._report_left_out.cache_clear()
    coverage._report_unused.cache_clear()


@pytest.fixture(scope="module")
def tokenizers():
    made = {}
    return lambda template: made.setdefault(template, make_tokenizer("byte_bpe", template))


def with_template(template):
    tokenizer = make_tokenizer("byte_bpe", "chatml")
    tokenizer.chat_template = template
    return tokenizer


def text_of(tokenizer, messages, tools=None, **spec):
    datum = sft_processor({"messages": messages, "tools": tools}, TaskDataSpec(**spec), tokenizer, None, 0)
    return "".join(message["content"] for message in datum["message_log"])


@pytest.mark.parametrize("template", WRITES_TOOLS)
def test_calls_and_tools_that_a_template_writes_are_found(tokenizers, template):
    text = text_of(tokenizers(template), CALLING, [TOOL])
    assert "find" in text and "Tiber" in text and "What to find" in text


@pytest.mark.parametrize(
    ("template", "messages", "tools", "reason"),
    [
        ("gemma", CALLING[:2], None, "tool calls of an assistant"),
        ("gemma", [ASK, {"role": "assistant", "content": "Tiber"}], [TOOL], "leaves out the tools"),
        ("plain_headers", CALLING[:2], None, "tool calls of an assistant"),
        (
            "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
            [{"role": "system", "content": "Be brief."}, ASK, {"role": "assistant", "content": "brief Be brief"}],
            None,
            "text of a message of the role 'system'",
        ),
        (
            "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
            [ASK, {"role": "tool", "content": "T"}, {"role": "assistant", "content": "T"}],
            None,
            "text of a message of the role 'tool'",
        ),
    ],
)
def test_a_row_that_loses_text_is_refused_with_the_reason(template, messages, tools, reason):
    tokenizer = with_template(TEMPLATES.get(template, template))
    with pytest.raises(DataError, match=reason):
        text_of(tokenizer, messages, tools)
    text_of(
        tokenizer, messages, tools, may_leave_out=["tool_calls", "tools", "tool_descriptions", "messages", "call_ids"]
    )


def test_a_dropped_argument_is_noticed():
    template = TEMPLATES["chatml"].replace("{{ c.function.arguments | tojson }}", "{}")
    with pytest.raises(DataError, match="tool calls"):
        text_of(with_template(template), CALLING, [TOOL])


def test_a_template_may_write_only_the_names_of_tools(caplog):
    names = "{{ t.function.name }}({{ t.function.parameters.properties | join }})"
    template = TEMPLATES["chatml"].replace("{{ t | tojson }}", names)
    assert "find(query)" in text_of(with_template(template), CALLING, [TOOL])
    assert "descriptions of tools" in caplog.records[0].getMessage()
    with pytest.raises(DataError, match="descriptions of tools"):
        text_of(with_template(template), CALLING, [TOOL], may_leave_out=["call_ids"])


def test_prompts_are_compared_too(tokenizers):
    row = {"messages": [ASK, {"role": "assistant", "content": "4"}], "tools": [TOOL]}
    assert math_hf_data_processor(row, TaskDataSpec(), tokenizers("chatml"), None, 0)["chat"]["tools"] == [TOOL]
    with pytest.raises(DataError, match="leaves out the tools"):
        math_hf_data_processor(row, TaskDataSpec(), tokenizers("gemma"), None, 0)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_that_is_left_out_is_reported_once(tokenizers, caplog, key):
    row = [ASK, {"role": "assistant", "content": "Tiber", key: "Rome has one."}]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            text_of(tokenizers("chatml"), row)
    assert [record.getMessage().count("reasoning of an assistant") for record in caplog.records] == [1]
    with pytest.raises(DataError, match="reasoning"):
        text_of(tokenizers("chatml"), row, may_leave_out=[])


def test_thinking_of_earlier_turns_is_reported_where_the_template_drops_it(tokenizers, caplog):
    turn = {"role": "assistant", "content": "<think>\nRome has one.\n</think>\n\nTiber"}
    assert "Rome has one." in text_of(tokenizers("qwen3"), [ASK, turn])
    assert not caplog.records
    assert "Rome has one." not in text_of(tokenizers("qwen3"), [ASK, turn, ASK, {"role": "assistant", "content": "x"}])
    assert "reasoning" in caplog.records[0].getMessage()


def test_a_key_of_messages_that_nothing_reads_is_reported_once(tokenizers, caplog):
    row = [{**ASK, "name": "alice", "score": 3}, {"role": "assistant", "content": "Tiber"}]
    for _ in range(2):
        text_of(tokenizers("chatml"), row)
    assert sorted(record.args[1] for record in caplog.records) == ["name", "score"]
    caplog.clear()
    coverage._report_unused.cache_clear()
    text_of(tokenizers("kimi"), [{**ASK, "name": "alice"}, {"role": "assistant", "content": "Tiber"}])
    assert not caplog.records  # this template writes names


@pytest.mark.parametrize("arguments", [{"query": "é"}, '{"query":  "é"}'])
def test_arguments_have_the_form_that_the_template_joins(tokenizers, arguments):
    call = {"type": "function", "function": {"name": "find", "arguments": arguments}}
    row = [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]
    forms = {template: arguments_form(tokenizers(template)) for template in WRITES_TOOLS}
    assert forms == {template: "text" if template == "deepseek" else "mapping" for template in WRITES_TOOLS}
    as_given = arguments if isinstance(arguments, str) else '{"query": "é"}'
    assert f"find\n{as_given}<|call_end|>" in text_of(tokenizers("deepseek"), row)
    assert '"arguments": {"query": "é"}}' in text_of(tokenizers("chatml"), row)


def test_a_template_that_prints_mappings_as_python_gets_text():
    template = TEMPLATES["deepseek"].replace("'\n' + c.function.arguments +", "'\n' ~ c.function.arguments ~")
    tokenizer = with_template(template.replace("'<|call|>' + c", "'<|call|>' ~ c").replace("name + '", "name ~ '"))
    assert '{"query": ' in text_of(tokenizer, CALLING[:2]) and "{'query'" not in text_of(tokenizer, CALLING[:2])


def test_roles_mean_the_same_in_rows_and_observations(tokenizers):
    tokenizer = tokenizers("chatml")
    for role, known in (("environment", "user"), ("function", "tool"), ("developer", "system"), ("tool", "tool")):
        observation = {"role": role, "content": "It rains."}
        assert f"<|im_start|>{known}\nIt rains." in text_of(
            tokenizer, [ASK, observation, {"role": "assistant", "content": "x"}]
        )
        log = [{"role": "user", "token_ids": encoded(tokenizer, [ASK])}]
        prompt_length = len(log[0]["token_ids"])
        log.append({"role": "assistant", "token_ids": log[0]["token_ids"][:0]})
        added = ObservationRenderer(tokenizer).token_ids(observation, log, prompt_length)
        assert f"<|im_start|>{known}\nIt rains." in tokenizer.decode(added)


def encoded(tokenizer, messages):
    text = render_chat(messages, tokenizer, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]


@pytest.mark.parametrize("flag", ["weight", "loss", "train", "training", "trainable", "train_on_turn"])
@pytest.mark.parametrize("off", [0, False, 0.0])
def test_a_turn_without_weight_does_not_count(tmp_path, tokenizers, flag, off):
    turns = [
        ASK,
        {"role": "assistant", "content": "BAD", flag: off},
        ASK,
        {"role": "assistant", "content": "good", flag: 1},
    ]
    path = write_lines(tmp_path / "rows.jsonl", {"messages": turns})
    raw = load_response_dataset(DatasetConfig.build(dataset_name="openai_format", data_path=path))
    tokenizer = tokenizers("chatml")
    datum = sft_processor(raw.dataset[0], TaskDataSpec(), tokenizer, None, 0, add_generation_prompt=True)
    batch = sft_collate_fn([datum], tokenizer, 1)
    assert tokenizer.decode(batch["input_ids"][0][batch["token_mask"][0] > 0]) == "good<|im_end|>"


@pytest.mark.parametrize(
    ("weights", "reason"), [((0.5, 1), "'weight' of a message is 0.5"), ((0, 0), "no assistant message counts")]
)
def test_odd_weights_are_refused_when_the_row_is_read(tmp_path, weights, reason):
    turns = [
        message for weight in weights for message in (ASK, {"role": "assistant", "content": "x", "weight": weight})
    ]
    path = write_lines(tmp_path / "rows.jsonl", {"messages": turns})
    raw = load_response_dataset(DatasetConfig.build(dataset_name="openai_format", data_path=path))
    assert not len(raw.dataset) and reason in raw.bad_rows[0].reason


def test_openai_s_older_call_of_a_function_is_a_tool_call(tmp_path, tokenizers):
    turns = [
        ASK,
        {"role": "assistant", "content": None, "function_call": {"name": "find", "arguments": '{"query": "x"}'}},
        {"role": "function", "name": "find", "content": "Tiber"},
        {"role": "assistant", "content": "Tiber"},
    ]
    path = write_lines(tmp_path / "rows.jsonl", {"messages": turns})
    raw = load_response_dataset(DatasetConfig.build(dataset_name="openai_format", data_path=path))
    text = text_of(tokenizers("chatml"), raw.dataset[0]["messages"])
    assert '{"name": "find", "arguments": {"query": "x"}}' in text and "<|im_start|>tool\nTiber" in text


def test_ids_of_calls_reach_templates_that_write_them(tmp_path, tokenizers):
    path = write_lines(tmp_path / "rows.jsonl", {"messages": CALLING, "tools": [TOOL]})
    raw = load_response_dataset(DatasetConfig.build(dataset_name="openai_format", data_path=path))
    text = text_of(tokenizers("kimi"), raw.dataset[0]["messages"], raw.dataset[0]["tools"], may_leave_out=[])
    assert "<|call|>call00001<|arguments|>" in text and "## Return of call00001" in text
    with pytest.raises(DataError, match="ids of tool calls"):
        text_of(tokenizers("chatml"), raw.dataset[0]["messages"], may_leave_out=[])


def test_rows_that_lose_text_are_summarised_and_a_key_allows_them(tmp_path, tokenizers, caplog):
    plain = {"messages": [ASK, {"role": "assistant", "content": "x"}], "note": "n"}
    path = write_lines(tmp_path / "rows.jsonl", {"messages": CALLING}, *[plain] * 19)
    entry = {"dataset_name": "openai_format", "data_path": path}
    with caplog.at_level(logging.INFO):
        data = setup_sft_data(tokenizers("gemma"), SupervisedDataConfig.build(train=entry, max_input_seq_length=200))
    assert len(data.train) == 19 and "the chat template leaves out the tool calls" in data.bad_rows[0].reason
    assert "nothing reads its columns note" in caplog.text
    allowed = {"template_may_leave_out": ["tool_calls", "call_ids"]}
    config = SupervisedDataConfig.build(train=entry, max_input_seq_length=200, **allowed)
    assert len(setup_sft_data(tokenizers("gemma"), config).train) == 20


class TestWhatEndsATurn:
    def turns(self, tokenizer, messages):
        datum = sft_processor({"messages": messages}, TaskDataSpec(), tokenizer, None, 0, add_generation_prompt=True)
        return [message["content"] for message in datum["message_log"] if message["role"] == "assistant"]

    def test_the_next_header_ends_a_turn(self, tokenizers):
        tokenizer = tokenizers("glm")
        calls, answer = self.turns(tokenizer, CALLING)
        assert calls.endswith("</tool_call><|observation|>") and answer == "It is the Tiber.</s>"
        again = [*CALLING, ASK, {"role": "assistant", "content": "Tiber"}]
        assert self.turns(tokenizer, again)[1:] == ["It is the Tiber.<|user|>", "Tiber</s>"]

    @pytest.mark.parametrize("lead", [[], [ASK]])
    def test_headers_between_assistant_turns_do_not_count(self, tokenizers, lead):
        tokenizer = tokenizers("chatml")
        turns = [{"role": "assistant", "content": "One."}, {"role": "assistant", "content": "Two."}]
        row = {"messages": [*lead, *turns]}
        datum = sft_processor(row, TaskDataSpec(), tokenizer, None, 0, add_generation_prompt=True)
        batch = sft_collate_fn([datum], tokenizer, 1)
        ids, mask = batch["input_ids"][0], batch["token_mask"][0] > 0
        assert tokenizer.decode(ids[mask]) == "One.<|im_end|>Two.<|im_end|>"
        whole = tokenizer.apply_chat_template(row["messages"], tokenize=False).rstrip("\n")
        assert ids.tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]

    def test_the_last_turn_ends_as_the_model_stops(self, tmp_path):
        tokenizer = make_tokenizer("byte_bpe", "glm")
        stops = [tokenizer.convert_tokens_to_ids(token) for token in ("</s>", "<|user|>", "<|observation|>")]
        tokenizer.save_pretrained(tmp_path)
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {stops}}}')
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        assert self.turns(loaded, CALLING)[-1] == "It is the Tiber.<|user|>"
        assert self.turns(loaded, CALLING[:2])[-1].endswith("</tool_call><|observation|>")


def test_a_header_that_later_turns_change_is_not_cut():
    """The generation prompt and the earlier turn share "<|" only (from a report about Phi-4 and another library)."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}"
        "{{ '<|assistant|>' if loop.last else '<|observation|>' }}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    turns = [ASK, {"role": "assistant", "content": "Tiber"}, ASK, {"role": "assistant", "content": "Rhine"}]
    row = {"messages": turns}
    log = sft_processor(row, TaskDataSpec(), with_template(template), None, 0, add_generation_prompt=True)[
        "message_log"
    ]
    assert [message["content"] for message in log[1::2]] == ["Tiber<|im_end|>", "Rhine<|im_end|>"]


def test_templates_that_refuse_a_chat_without_a_question_are_supported():
    """From a report about Qwen3.5 and another library."""
    refuse = "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    template = refuse + "{{ raise_exception('No user query found in messages.') }}{% endif %}" + TEMPLATES["chatml"]
    system = {"role": "system", "content": "Be brief."}
    row = {"messages": [system, *CALLING], "tools": [TOOL]}
    log = sft_processor(row, TaskDataSpec(), with_template(template), None, 0, add_generation_prompt=True)[
        "message_log"
    ]
    assert [message["content"][-10:] for message in log if message["role"] == "assistant"] == ["<|im_end|>"] * 2


@pytest.mark.parametrize("kind", ["sentencepiece_first", "sentencepiece_always", "legacy_llama", "byte_bpe"])
def test_a_prompt_that_ends_with_a_space_is_the_engine_s(kind):
    """From a report about a template of Mistral's form and another library."""
    tokenizer = make_tokenizer(kind, "chatml")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ ' [INST] ' + m.content + ' [/INST] ' }}"
        "{% else %}{{ m.content | trim + eos_token }}{% endif %}{% endfor %}"
    )
    row = {"messages": [ASK, {"role": "assistant", "content": "Rome."}]}
    log = sft_processor(row, TaskDataSpec(), tokenizer, None, 0, add_generation_prompt=True)["message_log"]
    prompt = math_hf_data_processor(row, TaskDataSpec(), tokenizer, None, 0)["message_log"][0]
    assert log[0]["token_ids"].equal(prompt["token_ids"])
    assert not tokenizer.convert_ids_to_tokens(log[1]["token_ids"].tolist())[0].startswith(("▁", "Ġ"))


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", [None, "default"])
def test_prompts_and_conversations_begin_with_bos_by_the_same_rule(tmp_path, adds_bos, template):
    from tokenizers.processors import TemplateProcessing

    made = make_tokenizer("byte_bpe", "chatml")
    if adds_bos:
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.bos_token_id)]
        )
    made.save_pretrained(tmp_path)
    tokenizer = get_tokenizer({"name": str(tmp_path), "chat_template": template})
    row = {"messages": [ASK, {"role": "assistant", "content": "x"}]}
    for process in (sft_processor, math_hf_data_processor):
        first = process(row, TaskDataSpec(), tokenizer, None, 0)["message_log"][0]["token_ids"][0]
        assert (first == made.bos_token_id) == adds_bos


def test_an_earlier_answer_that_begins_like_the_generation_prompt_keeps_its_beginning(tokenizers):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
    )
    for answer in ("**hi**", "<b>hi</b>", "<think>why</think>hi", "<think>\n\n</think>\n\nhi", "<"):
        messages = [ASK, {"role": "assistant", "content": answer}, ASK, {"role": "assistant", "content": "Sure."}]
        datum = sft_processor(
            {"messages": messages}, TaskDataSpec(), with_template(template), None, 0, add_generation_prompt=True
        )
        span = datum["message_log"][1]["content"]
        assert span == f"{answer}<|im_end|>" or (answer.startswith("<think>\n\n</think>") and span == "hi<|im_end|>")
