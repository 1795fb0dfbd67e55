"""Tell which part of a response is thinking, by its tags and by what the chat template writes before it."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.data.messages.encoding import render_chat
from nemo_rl.utils.errors import DataError

_THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
_QUESTION = {"role": "user", "content": "QUESTION"}

type ThinkingOfPrompt = Literal["opened", "ended", "absent"]


def thinking_of_prompt(tokenizer: TokenizerType, template_kwargs: Mapping[str, Any]) -> ThinkingOfPrompt:
    """Return whether the generation prompt opens the thinking of an answer, opens and ends it, or has no tags.

    Args:
        tokenizer: has the chat template.
        template_kwargs: variables of the template, such as `enable_thinking`.
    """
    variables = json.dumps(dict(template_kwargs), sort_keys=True, default=repr)
    return _read_prompt(tokenizer, str(tokenizer.chat_template), variables)


@lru_cache(maxsize=64)
def _read_prompt(tokenizer: TokenizerType, template: str, variables: str) -> ThinkingOfPrompt:
    try:
        prompt = render_chat(
            [_QUESTION], tokenizer, add_generation_prompt=True, template_kwargs=json.loads(variables)
        ).rstrip()
    except DataError:  # no chat template, or one that wants another conversation
        return "absent"
    if prompt.endswith(END_OF_THOUGHT):
        return "ended"
    return "opened" if prompt.endswith(_THOUGHT) else "absent"


def starts_of_answer(text: str, *, opened: bool = False) -> list[int]:
    """Return where the answer may begin, the likeliest place last: after the last `</think>`, or after the first one.

    The prompt may have opened the thinking, so `<think>` need not be in the text. An answer whose thinking does not end
    begins nowhere.

    Args:
        text: a response.
        opened: whether the prompt is known to have opened the thinking.
    """
    ends = [found.end() for found in re.finditer(END_OF_THOUGHT, text)]
    if not ends:
        return [] if opened or text.lstrip().startswith(_THOUGHT) else [0]
    return [*([] if _THOUGHT in text[: ends[0]] else [0]), ends[0], ends[-1]]


def text_of_answer(text: str) -> str:
    """Return a response without its thinking."""
    starts = starts_of_answer(text)
    return text[starts[-1] :] if starts else ""
