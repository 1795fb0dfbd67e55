"""Render an environment's message to the tokens that it adds to a conversation.

The sampled tokens do not change. They are followed by the text that the chat template writes between two assistant
turns: the token that ends the turn (unless it was sampled), the message, and the header of the next turn. This text is
taken from a separate short chat, because templates may render earlier turns of the real conversation differently (Qwen3
drops their reasoning). Invariant: the conversation is never rendered again.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch

from nemo_rl.data.images.messages import expanded, images_in, load_images, with_parts
from nemo_rl.data.interfaces import Chat, LLMMessageLogType, Message, TokenizerType
from nemo_rl.data.messages.content import IMAGE_MARK, TextRules, content_text
from nemo_rl.data.messages.control_tokens import control_tokens_of
from nemo_rl.data.messages.encoding import encode_continuation, encode_text, render_chat
from nemo_rl.data.processors import prompt_entry
from nemo_rl.utils.errors import DataError

_QUESTION = {"role": "user", "content": "QUESTION"}
_ANSWER = "ANSWER"
_SAID = "OBSERVATION"
_LONGEST_OPENING = 256
"""Largest number of tokens in the header of an assistant turn and the prompt's words at the start of the turn."""


def template_message(observation: Mapping[str, Any]) -> Message:
    """Convert an observation to a message with text as content, in which `IMAGE_MARK` stands for an image.

    Raises:
        DataError: a part is neither text nor an image that was read, or not valid Unicode.
    """
    text = content_text(observation.get("content"), "the content of an observation", IMAGE_MARK)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            "the content of an observation is not valid Unicode (lone surrogate). Decode the output of programs with "
            'errors="replace"'
        ) from error
    return {**observation, "role": str(observation.get("role")), "content": text}


def messages_of(observation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of an observation: its `messages`, or the observation itself."""
    return [dict(each) for each in observation.get("messages") or [observation]]


class ObservationRenderer:
    """Render observations to tokens.

    Args:
        tokenizer: tokenizer. If it has no chat template, observations are plain text.
        rules: rules that decide whether observations are encoded as ordinary text, or None for `TextRules()`.
        template_kwargs: variables for the chat template, which should be those of the prompt's `Chat`.
    """

    def __init__(
        self,
        tokenizer: TokenizerType,
        rules: TextRules | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._variables = template_kwargs
        self._rules = rules or TextRules()
        self._head = lru_cache(self._find_head)

    def token_ids(
        self,
        observation: Mapping[str, Any],
        message_log: LLMMessageLogType,
        prompt_length: int,
        longest: int | None = None,
    ) -> torch.Tensor:
        """Return the tokens that an observation adds after the last turn of a conversation, [t] int64.

        The chat template is used if the prompt was rendered with it, which the header of the assistant's turn shows.
        Otherwise, the observation is encoded as plain text.

        Args:
            observation: `role` (`template_form`) and `content`, or a list of several messages in `messages`.
            message_log: the conversation, whose last message was sampled.
            prompt_length: number of tokens before the first response.
            longest: argument of `encode_text`.

        Raises:
            DataError: the content is neither text nor images that were read (`read`), or the template refuses or leaves
                out the message.
        """
        messages = [self.message(each) for each in messages_of(observation)]
        images = images_in(messages_of(observation))
        prompt_ids = torch.cat([turn["token_ids"] for turn in message_log])[:prompt_length]
        if not self._is_chat(prompt_ids[-_LONGEST_OPENING:]):
            if images:
                raise DataError("the prompt was not rendered with the chat template, so no image can follow it")
            return encode_continuation("\n".join(message["content"] for message in messages), self._tokenizer, longest)
        ids = self._continuation(
            self._added(*messages), self._head(messages[0]["role"]), message_log[-1]["token_ids"].tolist(), longest
        )
        if longest is not None and ids.numel() > longest:
            return ids  # the text may have been cut before its images
        return expanded([ids], images, self._tokenizer)[0]

    def read(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Return the observation with its images read, if the tokenizer's model reads images.

        Raises:
            DataError: an image cannot be used.
        """
        if "messages" in observation:
            return {**observation, "messages": self._read(messages_of(observation))}
        return self._read([dict(observation)])[0]

    def _read(self, messages: list[Message]) -> list[Message]:
        return load_images(messages, self._tokenizer, self._rules.images)

    def message(self, observation: Mapping[str, Any]) -> Message:
        """Convert an observation to a message for `render_chat`, with quoted control tokens if the rules require it.

        Raises:
            DataError: a part is not text.
        """
        message = template_message(observation)
        return control_tokens_of(self._tokenizer).quoted(message, of_tools=True) if self._rules.tools else message

    def first_of_prompt(self, chat: Chat, observation: Mapping[str, Any]) -> Message:
        """Return the single log message of a prompt that ends with an observation.

        Raises:
            DataError: the content is not text, or the template refuses the chat.
        """
        control = control_tokens_of(self._tokenizer)
        added = [self.message(each) for each in messages_of(observation)]
        added = with_parts(added, images_in(messages_of(observation)))
        messages = [*control.quoted_chat(chat["messages"], self._rules), *added]
        quoted: Chat = {**chat, "messages": messages, "tools": control.quoted_tools(chat["tools"], self._rules)}
        return prompt_entry(quoted, self._tokenizer, rules=TextRules(rows=False, tools=False))

    def control_token_in(self, observation: Mapping[str, Any]) -> str | None:
        """Return the first control token in the text of an observation, quoted or not."""
        text = template_message(observation)["content"]
        return control_tokens_of(self._tokenizer).first_in(text, of_tools=True)

    def _is_chat(self, prompt_end: torch.Tensor) -> bool:
        """Return whether a prompt ends with the template's header of an assistant turn, or with it and more words."""
        return self._tokenizer.chat_template is not None and self._opening in self._shown(prompt_end)

    def _shown(self, token_ids: torch.Tensor) -> str:
        """Return the text of tokens without white space, because some tokenizers change white space."""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return "".join(str(text).split())

    @cached_property
    def _opening(self) -> str:
        """The header of an assistant turn without white space. It is empty if the template writes no header."""
        closed, opened = (
            render_chat([_QUESTION], self._tokenizer, add_generation_prompt=header, template_kwargs=self._variables)
            for header in (False, True)
        )
        header = opened.removeprefix(closed).strip() if opened.startswith(closed) else ""
        return self._shown(encode_continuation(header, self._tokenizer))

    def _added(self, *messages: Message) -> str:
        """Return the text that the template writes after an assistant's words, if `messages` follow."""
        chat = [_QUESTION, {"role": "assistant", "content": _ANSWER}, *messages]
        rendered = render_chat(chat, self._tokenizer, add_generation_prompt=True, template_kwargs=self._variables)
        return rendered.partition(_ANSWER)[2]

    def _find_head(self, role: str) -> str:
        """Return the text that the template writes between an assistant's words and a message of this role."""
        head, found, _ = self._added({"role": role, "content": _SAID}).partition(_SAID)
        if not found:
            raise DataError(
                f"the chat template of tokenizer {self._tokenizer.name_or_path!r} leaves out messages of the role "
                f'{role!r}. Give the observation another role ("environment" is rendered as "user"), or set '
                "policy.tokenizer.chat_template."
            )
        return head

    def _continuation(self, added: str, head: str, written: list[int], longest: int | None) -> torch.Tensor:
        """Return the tokens of `added`, without the start of its `head` that `written` already ends with.

        Some templates write white space before the token that ends a turn, but a model that ended its turn did not.
        """
        for start in (0, len(head) - len(head.lstrip())):
            ids, head_ids = (encode_text(text[start:], self._tokenizer, longest) for text in (added, head))
            shared = _overlap(written, head_ids.tolist())
            if shared and ids[:shared].equal(head_ids[:shared]):
                return ids[shared:]
        return encode_continuation(added, self._tokenizer, longest)


def _overlap(written: Sequence[int], head: Sequence[int]) -> int:
    """Return the length of the longest prefix of `head` that is a suffix of `written`."""
    longest = min(len(written), len(head))
    return next((size for size in range(longest, 0, -1) if list(written[-size:]) == list(head[:size])), 0)
