"""SFT trains on the tokens of an episode as an engine samples them, for each kind of tokenizer and chat template.

The reference never looks at a whole conversation. It asks for the prompt of a request, takes the answer's tokens as an
engine would return them, and lets the observations of the next turn follow: the road of GRPO.
"""

import json
import random

import pytest
import torch
from chat_templates import KINDS, REWRITES, TEMPLATES, WITHOUT_TOOLS, make_tokenizer

from nemo_rl.data.collate_fn import sft_collate_fn
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.messages.conversations import sft_processor
from nemo_rl.data.messages.observations import ObservationRenderer
from nemo_rl.data.processors import prompt_entry

pytestmark = pytest.mark.fast

CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "find", "arguments": {"query": "a river", "count": 3}},
}
TOOL = {"type": "function", "function": {"name": "find", "description": "Finds things."}}
ANSWERS = (
    "Rome.",
    "<b>Rome</b> is a city",
    "12 and 345",
    "- one\n- two\n\nYes, I say so:",
    "  indented",
    "Tiber\n\nnear",
)


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def turns(*texts):
    return [say("user" if number % 2 == 0 else "assistant", text) for number, text in enumerate(texts)]


EPISODES = {
    **{f"answer {answer!r}": (turns("Name a city.", answer), None) for answer in ANSWERS},
    "system": ([say("system", "Be brief."), *turns("Name a city.", "Rome.")], None),
    "three turns": (
        turns("Name a city.", "Rome.", "And a river?", "The Tiber: near.", "Sure?", "Yes, I say so."),
        None,
    ),
    "odd turns": (turns("a", "<b>1</b>", "\n\nb", "{2}", "  c", "12 and"), None),
    "call": (
        [
            say("user", "Find a river."),
            say("assistant", "", tool_calls=[CALL]),
            say("tool", "Tiber", tool_call_id="call00001", name="find"),
            say("assistant", "It is the Tiber."),
        ],
        [TOOL],
    ),
}


def trained(tokenizer, messages, tools):
    """Return the tokens of the conversation and which of them count."""
    row = {"messages": messages, "tools": tools}
    datum = sft_processor(row, TaskDataSpec(), tokenizer, None, 0, add_generation_prompt=True)
    batch = sft_collate_fn([datum], tokenizer, 1)
    return batch["input_ids"][0].tolist(), batch["token_mask"][0].bool().tolist()


def answer_ids(tokenizer, before, after):
    """Return the tokens of an answer as an engine returns them: those that make `after` of `before`.

    Where a token of the whole text crosses the end of the prompt, a model cannot sample it; the answer is then encoded
    after the prompt's own tokens, by finding the tokens that continue a text of one character.
    """
    prompt = tokenizer(before, add_special_tokens=False)["input_ids"]
    whole = tokenizer(after, add_special_tokens=False)["input_ids"]
    if whole[: len(prompt)] == prompt:
        return whole[len(prompt) :]
    rest = after.removeprefix(before)
    for start in ("\n", "0", ":"):
        head = tokenizer(start, add_special_tokens=False)["input_ids"]
        both = tokenizer(start + rest, add_special_tokens=False)["input_ids"]
        name = tokenizer.convert_ids_to_tokens(both[len(head)]) if len(both) > len(head) else "▁"
        if both[: len(head)] == head and not name.startswith(("▁", "Ġ")):
            return both[len(head) :]
    return tokenizer(rest, add_special_tokens=False)["input_ids"]


def sampled(tokenizer, messages, tools, first):
    """Return the tokens of an episode that begins with the prompt before message `first`, and which were sampled."""
    if "function.arguments + " in tokenizer.chat_template:
        messages = [with_text_arguments(message) for message in messages]
    prompt = prompt_entry({"messages": messages[:first], "tools": tools}, tokenizer)
    ids, mask = prompt["token_ids"].tolist(), [False] * len(prompt["token_ids"])
    log = [prompt]
    for number in range(first, len(messages)):
        if messages[number]["role"] != "assistant":
            added = ObservationRenderer(tokenizer).token_ids(messages[number], log, len(prompt["token_ids"])).tolist()
            log.append({"role": "user", "content": "", "token_ids": torch.tensor(added)})
            ids, mask = ids + added, mask + [False] * len(added)
            continue
        before = tokenizer.apply_chat_template(
            messages[:number], tokenize=False, add_generation_prompt=True, tools=tools
        )
        after = tokenizer.apply_chat_template(messages[: number + 1], tokenize=False, tools=tools)
        answer = answer_ids(tokenizer, before, closed(after, tokenizer, messages[number + 1 : number + 2]))
        log.append({"role": "assistant", "content": "", "token_ids": torch.tensor(answer)})
        ids, mask = ids + answer, mask + [True] * len(answer)
    return ids, mask


def with_text_arguments(message):
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def closed(text, tokenizer, following):
    """Return the chat up to the token at which a model stops, which the template or the next turn's header writes."""
    stripped = text.rstrip()
    if stripped.endswith(("<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>")):
        return stripped
    if not following:
        return text.rstrip("\n") + tokenizer.eos_token
    return text + ("<|observation|>" if following[0]["role"] == "tool" else "<|user|>")


PIECES = (
    "Rome",
    " ",
    "\n",
    "\n\n",
    ": ",
    "12",
    "<b>",
    "The",
    "  ",
    "{",
    '"',
    "é",
    "日本",
    "\t",
    "- ",
    "?",
    "a",
    "'s",
    "##",
)


def random_turns(seed):
    """Return a conversation of one to three answers, put together from pieces that tokenizers join."""
    draw = random.Random(seed)
    texts = ["".join(draw.choices(PIECES, k=draw.randint(1, 6))) for _ in range(2 * draw.randint(1, 3))]
    return turns(*(text if text.strip() else "x" + text for text in texts))


RANDOM_EPISODES = {f"random {seed}": (random_turns(seed), None) for seed in range(24)}


def cases(template):
    for name, (messages, tools) in (EPISODES | RANDOM_EPISODES).items():
        if not (tools and template in WITHOUT_TOOLS):
            yield name, messages, tools


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_supervised_rows_are_those_of_sampled_episodes(kind):
    different, tried = [], 0
    for template in TEMPLATES:
        tokenizer = make_tokenizer(kind, template)
        for name, messages, tools in cases(template):
            assistants = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
            # A template that renders earlier turns differently has only the last answer as it was sampled.
            first = assistants[-1 if template in REWRITES else 0]
            want_ids, want_mask = sampled(tokenizer, messages, tools, first)
            ids, mask = trained(tokenizer, messages, tools)
            # Engines read the history of such a prompt as one text, so only the answer is compared.
            start = want_mask.index(True) - len(want_ids) if template in REWRITES else 0
            tried += 1
            if (ids[start:], mask[start:]) != (want_ids[start:], want_mask[start:]):
                different.append((template, name, show(tokenizer, ids, mask), show(tokenizer, want_ids, want_mask)))
    assert tried > 300
    assert not different, f"{len(different)} of {tried}: " + "\n".join(map(str, different[:6]))


def show(tokenizer, ids, mask):
    names = tokenizer.convert_ids_to_tokens(ids)
    return [("*" if counts else "") + str(token) for token, counts in zip(names, mask, strict=True)]
