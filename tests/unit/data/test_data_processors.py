"""Tokenizer loading, and processors against the chat template itself."""

import copy
import json
import logging
import pickle
import resource
import time

import psutil
import pytest

from nemo_rl.config import TokenizerConfig
from nemo_rl.data import processors
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.utils.errors import ConfigError, DataError

pytestmark = pytest.mark.fast

USER = [{"role": "user", "content": "1+1="}]


def config(name, chat_template="default", kwargs=None):
    return TokenizerConfig(name=str(name), chat_template=chat_template, chat_template_kwargs=kwargs)


def row(question="What is 2+2?", answer="4", **more):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "task_name": "math", **more}


def rendered(tokenizer, **kwargs):
    return tokenizer.apply_chat_template(USER, tokenize=False, add_generation_prompt=True, **kwargs)


def test_a_chat_template_is_chosen_by_name_file_or_text(qwen3_folder, tmp_path):
    folder = qwen3_folder
    assert rendered(get_tokenizer(config(folder))).startswith("<|im_start|>user\n1+1=")
    assert rendered(get_tokenizer(config(folder, None))) == "1+1="
    assert rendered(get_tokenizer(config(folder, "Q:{{ messages[0].content }}"))) == "Q:1+1="
    (tmp_path / "t.jinja").write_text("J:{{ messages[0].content }}")
    assert rendered(get_tokenizer(config(folder, str(tmp_path / "t.jinja")))) == "J:1+1="
    with pytest.raises(ConfigError, match=r"none\.jinja.*cannot be read"):
        get_tokenizer(config(folder, "none.jinja"))
    with pytest.raises(ConfigError, match=r"policy\.tokenizer\.chat_template leaves out what the user says.*'Hello'"):
        get_tokenizer(config(folder, "Hello"))
    get_tokenizer(config(folder, "{{ raise_exception('only with a system message') }}"))


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("Hello.", "leaves out what the user says"),
        (" ", "leaves out what the user says"),
        (f"{{{{ messages[0].content }}}}{ENDLESS}", r"with a chat of a few words takes longer than 0\.5 s"),
    ],
)
def test_templates_that_make_no_prompt_are_refused(qwen3_folder, monkeypatch, template, message):
    monkeypatch.setattr("nemo_rl.data.tokenizer.TEMPLATE_LIMIT_S", 0.5)
    with pytest.raises(ConfigError, match=f"policy.tokenizer.chat_template {message}"):
        get_tokenizer(config(qwen3_folder, template))
    refuses = "{{ raise_exception('system first') }}"  # a heuristic finds that it was made for other chats
    assert get_tokenizer(config(qwen3_folder, refuses)).chat_template == refuses


BOMBS = {
    "a long text": "{% set x = 'a' * 9999999999 %}{{ messages[0]['content'] }}",
    "a large power": "{{ 9 ** (9 ** 9) }}{{ messages[0]['content'] }}",
    "a wide number": "{{ '%9999999999d' % 1 }}{{ messages[0]['content'] }}",
    "a wide filter": "{{ 'a'|center(9999999999) }}{{ messages[0]['content'] }}",
    "a wide method": "{{ 'a'.ljust(9999999999) }}{{ messages[0]['content'] }}",
    "doubling": "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}x",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}x",
    "a long list": "{{ ([0] * 9999999999)|length }}{{ messages[0]['content'] }}",
    "replacing": "{% set n = namespace(x='aaaaaaaa') %}"
    "{% for i in range(9) %}{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
    "only for answers": "{{ messages[0]['content'] }}{% if add_generation_prompt %}{{ 'a' * 9999999999 }}{% endif %}",
    "only for tools": "{{ messages[0]['content'] }}{% if tools %}{{ 'a' * 9999999999 }}{% endif %}",
    "only for later turns": "{{ messages[0]['content'] }}{% if messages|length > 3 %}{{ 'a' * 9999999999 }}{% endif %}",
    "only for many turns": "{{ messages[0]['content'] }}{% if messages|length > 20 %}{{ 'a' * 9999999999 }}{% endif %}",
}
"""Chat templates of a stranger that use up time or memory."""


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_uses_up_the_machine_is_refused(name, qwen3_folder, monkeypatch):
    monkeypatch.setattr("nemo_rl.data.tokenizer.TEMPLATE_LIMIT_S", 2.0)
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    children = psutil.Process().children()  # Ray's processes, where an earlier test has started it
    with pytest.raises(ConfigError, match=r"policy\.tokenizer\.chat_template .* (takes longer|needs more)"):
        get_tokenizer(config(qwen3_folder, BOMBS[name]))
    assert time.monotonic() - started < 15
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "in KiB: the process itself took it"
    assert set(psutil.Process().children()) <= set(children)


def test_template_kwargs_are_bound_and_survive_copies(qwen3_folder):
    tokenizer = get_tokenizer(config(qwen3_folder, kwargs={"enable_thinking": False}))
    for one in (tokenizer, copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert rendered(one).endswith("<think>\n\n</think>\n\n")
    assert not rendered(tokenizer, enable_thinking=True).endswith("</think>\n\n")


def test_pad_token_falls_back_to_eos(qwen3, tmp_path, caplog):
    bare = copy.deepcopy(qwen3)
    bare.pad_token, bare.chat_template = None, None
    bare.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        tokenizer = get_tokenizer(config(tmp_path))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == qwen3.eos_token_id
    assert "padding with its end-of-sequence token" in caplog.text
    assert "has no chat template" in caplog.text
    spec = TaskDataSpec("math")
    with pytest.raises(DataError, match="chat_template: null"):
        processors.math_hf_data_processor(row(), spec, tokenizer, 64, 0)


def test_a_missing_tokenizer_is_refused_with_advice(tmp_path):
    with pytest.raises(ConfigError, match="policy.tokenizer.name"):
        get_tokenizer(config(tmp_path))


def test_prompt_ids_equal_the_chat_template(chat_tokenizer, tmp_path):
    (tmp_path / "p.txt").write_text("Think.\n{}")
    (tmp_path / "s.txt").write_text("You are terse.")
    spec = TaskDataSpec("math", tmp_path / "p.txt", tmp_path / "s.txt")
    datum = processors.math_hf_data_processor(row(), spec, chat_tokenizer, 512, 7)
    expected = chat_tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "You are terse."},
            {"role": "user", "content": "Think.\nWhat is 2+2?"},
        ],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    (message,) = datum["message_log"]
    assert message["token_ids"].tolist() == expected
    assert chat_tokenizer.decode(expected) == message["content"]
    assert datum["length"] == len(expected) and datum["loss_multiplier"] == 1.0
    assert datum["extra_env_info"] == {"ground_truth": "4"}
    assert (datum["idx"], datum["task_name"]) == (7, "math")


def test_the_system_message_of_a_row_follows_that_of_the_task(minimind, tmp_path):
    (tmp_path / "s.txt").write_text("Task.")
    messages = [{"role": "system", "content": "Context."}, *row()["messages"]]
    spec = TaskDataSpec("math", None, tmp_path / "s.txt")
    datum = processors.math_hf_data_processor({"messages": messages}, spec, minimind, None, 0)
    assert "<|im_start|>system\nTask.\n\nContext.<|im_end|>" in datum["message_log"][0]["content"]
    assert "task_name" not in datum


def test_a_prompt_at_the_limit_is_kept_and_a_longer_one_becomes_a_stub(bare_tokenizer):
    spec = TaskDataSpec("math")
    kept = processors.math_hf_data_processor(row("12+34="), spec, bare_tokenizer, 6, 0)
    assert (kept["length"], kept["loss_multiplier"]) == (6, 1.0)
    stub = processors.math_hf_data_processor(row("12+345="), spec, bare_tokenizer, 6, 0)
    assert (stub["length"], stub["loss_multiplier"]) == (4, 0.0)
    assert stub["message_log"][0]["token_ids"].tolist() == kept["message_log"][0]["token_ids"][:4].tolist()


def test_an_sft_stub_truncates_each_message(bare_tokenizer):
    datum = processors.sft_processor(row("12+345=", "357"), TaskDataSpec("math"), bare_tokenizer, 5, 0)
    assert [len(message["token_ids"]) for message in datum["message_log"]] == [2, 2]
    assert (datum["length"], datum["loss_multiplier"]) == (4, 0.0)


def test_the_math_processor_formats_problem_and_truth(chat_tokenizer):
    raw = {"problem": "2+2", "expected_answer": 4}
    datum = processors.math_data_processor(raw, TaskDataSpec(), chat_tokenizer, 99, 0)
    expected = chat_tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+2"}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert datum["message_log"][0]["token_ids"].tolist() == expected
    assert datum["extra_env_info"] == {"ground_truth": "4"}
    with pytest.raises(DataError, match="lacks expected_answer and has problem"):
        processors.math_data_processor({"problem": "1"}, TaskDataSpec(), chat_tokenizer, 9, 0)


def test_the_multiple_choice_processor_letters_the_options(chat_tokenizer, tmp_path):
    (tmp_path / "p.txt").write_text("Answer with {{A}}.")
    spec = TaskDataSpec("mmlu", tmp_path / "p.txt")
    raw = {"question": "Capital?", "options": ["Rome", "Paris"], "answer": 1, "subject": "geo"}
    datum = processors.multichoice_qa_processor(raw, spec, chat_tokenizer, 512, 0)
    text = "Answer with {A}.\n\nQuestion: Capital?\nOptions:\nA) Rome\nB) Paris"
    assert text in datum["message_log"][0]["content"]
    assert datum["extra_env_info"] == {"ground_truth": "B", "subject": "geo"}


def test_processors_are_found_and_registered_by_name(monkeypatch):
    monkeypatch.setattr(processors, "PROCESSOR_REGISTRY", dict(processors.PROCESSOR_REGISTRY))
    assert processors.get_processor(None) is processors.math_hf_data_processor
    processors.register_processor("mine", processors.sft_processor)
    assert processors.get_processor("mine") is processors.sft_processor
    with pytest.raises(DataError, match="exists already"):
        processors.register_processor("mine", processors.math_data_processor)
    with pytest.raises(DataError, match="'math_procesor' is unknown; choose one of"):
        processors.get_processor("math_procesor")


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("given", [TOOLS, json.dumps(TOOLS)], ids=["list", "text"])
def test_tools_of_a_row_are_offered_in_the_prompt_and_known_to_the_environment(chat_tokenizer, given):
    datum = processors.math_hf_data_processor(row(tools=given), TaskDataSpec(), chat_tokenizer, None, 0)
    question = [{"role": "user", "content": "What is 2+2?"}]
    wanted = chat_tokenizer.apply_chat_template(question, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert datum["message_log"][0]["content"] == wanted
    assert datum["extra_env_info"] == {"ground_truth": "4", "tools": TOOLS}
    assert datum["chat"] == {"messages": question, "tools": TOOLS}
    without = processors.math_hf_data_processor(row(), TaskDataSpec(), chat_tokenizer, None, 0)
    assert without["extra_env_info"] == {"ground_truth": "4"} and without["chat"]["tools"] is None


def test_parts_of_a_prompt_are_joined_and_images_refused(chat_tokenizer):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]
    plain, joined = (
        processors.math_hf_data_processor(row(question), TaskDataSpec(), chat_tokenizer, None, 0)
        for question in ("What is 2+2?", parts)
    )
    assert joined["message_log"][0]["content"] == plain["message_log"][0]["content"]
    image = [*parts, {"type": "image", "image": None}]
    with pytest.raises(
        DataError, match="parts that are not text: image; without policy.is_vlm=true the processors here read text only"
    ):
        processors.math_hf_data_processor(row(image), TaskDataSpec(), chat_tokenizer, None, 0)
