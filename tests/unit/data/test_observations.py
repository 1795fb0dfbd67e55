"""Tokens that observations add, against the chat template's own rendering of the whole conversation."""

import pytest
from transformers import AutoTokenizer

from nemo_rl.data.messages.encoding import encode_text, render_chat
from nemo_rl.data.messages.observations import ObservationRenderer
from nemo_rl.data.processors import prompt_entry
from nemo_rl.data.tokenizer import PASSTHROUGH_TEMPLATE
from nemo_rl.utils.errors import DataError

pytestmark = pytest.mark.fast

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
ENDS = {"minimind": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "llama2": "</s>", "plain": ""}


def with_template(folder, template, *tokens, **special):
    tokenizer = AutoTokenizer.from_pretrained(folder, **special)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(params=ENDS)
def named(request, minimind, qwen3, qwen3_folder):
    """Return (name, tokenizer): real ones, and templates of other kinds over Qwen3's vocabulary."""
    made = {
        "minimind": lambda: minimind,
        "qwen3": lambda: qwen3,
        "llama3": lambda: with_template(
            qwen3_folder, LLAMA3, "<|start_header_id|>", "<|end_header_id|>",
            bos_token="<|begin_of_text|>", eos_token="<|eot_id|>",
        ),
        "llama2": lambda: with_template(qwen3_folder, LLAMA2, bos_token="<s>", eos_token="</s>"),
        "plain": lambda: with_template(qwen3_folder, PLAIN),
    }  # fmt: skip
    return request.param, made[request.param]()


def play(tokenizer, turns, tools=None):
    """Play a question, then (sampled text, observation) in turns; return the log and the chat as in a rollout."""
    renderer = ObservationRenderer(tokenizer)
    chat = [{"role": "user", "content": "What is 2+2?"}]
    entry = prompt_entry({"messages": chat, "tools": tools}, tokenizer)
    log, length = [entry], len(entry["token_ids"])
    for sampled, observation in turns:
        log.append({"role": "assistant", "content": sampled, "token_ids": encode_text(sampled, tokenizer)})
        ids = renderer.token_ids(observation, log, length)
        log.append({**observation, "token_ids": ids})
    return log


def text_of(tokenizer, log):
    return tokenizer.decode([token for message in log for token in message["token_ids"].tolist()])


def whole(tokenizer, turns):
    """Return the same conversation as the template renders it from its messages."""
    chat = [{"role": "user", "content": "What is 2+2?"}]
    for said, observation in turns:
        role = "user" if observation["role"] == "environment" else observation["role"]
        chat += [{"role": "assistant", "content": said}, {"role": role, "content": observation["content"]}]
    return render_chat(chat, tokenizer, add_generation_prompt=True)


def says(*texts, role="environment"):
    return [{"role": role, "content": text} for text in texts]


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "cut off"])
@pytest.mark.parametrize("words", [["4"], ["4", "It is  5"], ["4", "5!", "Six, \n\nI say."]], ids=len)
def test_a_conversation_equals_the_rendered_template(named, words, finished):
    name, tokenizer = named
    observations = says("Wrong,  try\nagain.", "Once more: é 你", "Last")[: len(words)]
    sampled = [word + ENDS[name] * finished for word in words]
    found = text_of(tokenizer, play(tokenizer, list(zip(sampled, observations, strict=True))))
    expected = whole(tokenizer, list(zip(words, observations, strict=True)))
    if name == "llama2":  # the white space around a turn comes from the template, not from a model
        found, expected = (text.replace(" </s>", "</s>").replace("[/INST] ", "[/INST]") for text in (found, expected))
    assert found == expected


def test_the_tokens_equal_those_of_the_whole_text(chat_tokenizer):
    turns = list(zip(["4<|im_end|>", "5<|im_end|>"], says("Wrong.", "Right."), strict=True))
    log = play(chat_tokenizer, turns)
    ids = [token for message in log for token in message["token_ids"].tolist()]
    said = list(zip(["4", "5"], says("Wrong.", "Right."), strict=True))
    assert ids == encode_text(whole(chat_tokenizer, said), chat_tokenizer).tolist()


def test_sampled_reasoning_is_kept_although_the_template_drops_it(qwen3):
    sampled = "<think>\nhm\n</think>\n\n4<|im_end|>"
    log = play(qwen3, [(sampled, says("Wrong.")[0])])
    assert "hm" not in whole(qwen3, [("<think>\nhm\n</think>\n\n4", says("Wrong.")[0])])
    assert text_of(qwen3, log).endswith(
        f"assistant\n{sampled}\n<|im_start|>user\nWrong.<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("sampled", "delta"),
    [
        ("4</answer>", "<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"),
        ("4<|im_end|>", "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"),
        ("4<|im_end|>\n", "<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"),
        ("4\n", "<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"),
        ("4<|endoftext|>", "<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"),
        ("", "<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"),
    ],
    ids=["stop string", "end token", "end and line", "line", "another end", "nothing"],
)
def test_only_the_missing_end_of_a_turn_is_added(qwen3, sampled, delta):
    log = play(qwen3, [(sampled, says("No.")[0])])
    assert log[-1]["token_ids"].tolist() == encode_text(delta, qwen3).tolist()


def test_a_tool_answer_is_rendered_as_a_tool_message(chat_tokenizer):
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>'
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    log = play(chat_tokenizer, [(call, says("4", role="tool")[0])], tools)
    assert '{"type": "function", "function": {"name": "add"' in log[0]["content"]
    text = chat_tokenizer.decode(log[-1]["token_ids"])
    assert text.startswith(
        "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_parts_are_joined_and_images_refused(qwen3):
    parts = [{"type": "text", "text": "Wr"}, {"type": "text", "text": "ong."}]
    as_parts = play(qwen3, [("4<|im_end|>", {"role": "environment", "content": parts})])
    as_text = play(qwen3, [("4<|im_end|>", says("Wrong.")[0])])
    assert as_parts[-1]["token_ids"].equal(as_text[-1]["token_ids"])
    image = [*parts, {"type": "image", "image": None}]
    for content, reason in ((image, "not text: image; without policy.is_vlm"), (None, "None")):
        with pytest.raises(DataError, match=f"content of an observation.*{reason}"):
            play(qwen3, [("4<|im_end|>", {"role": "environment", "content": content})])


def test_a_text_that_is_not_unicode_is_refused(qwen3):
    """A program's output decoded with `surrogateescape`; the tokenizer would raise a TypeError that ends the run."""
    with pytest.raises(DataError, match="content of an observation is not valid Unicode"):
        play(qwen3, [("4<|im_end|>", says("a\udc80")[0])])


def test_without_a_chat_template_observations_are_plain_text(qwen3, qwen3_folder):
    """A prompt that bypassed the template, a template of contents only, and no template."""
    raw = [{"role": "user", "content": "2+2=", "token_ids": encode_text("2+2=", qwen3)}]
    answered = [*raw, {"role": "assistant", "content": "5", "token_ids": encode_text("5", qwen3)}]
    bare = encode_text(" No: ", qwen3)
    assert ObservationRenderer(qwen3).token_ids(says(" No: ")[0], answered, 4).equal(bare)
    for template in (PASSTHROUGH_TEMPLATE, None):
        tokenizer = AutoTokenizer.from_pretrained(qwen3_folder)
        tokenizer.chat_template = template
        assert ObservationRenderer(tokenizer).token_ids(says(" No: ")[0], answered, 4).equal(bare)


def test_roles_that_a_template_lacks_are_named(qwen3, qwen3_folder):
    with pytest.raises(DataError, match="leaves out messages of the role 'referee'"):
        play(qwen3, [("4<|im_end|>", {"role": "referee", "content": "No."})])
    strict = with_template(qwen3_folder, LLAMA2, bos_token="<s>", eos_token="</s>")
    with pytest.raises(DataError, match=r"roles \[user, assistant, tool\]: roles must alternate"):
        play(strict, [("4</s>", {"role": "tool", "content": "No."})])
