"""Find control tokens in texts that must not contain any, and encode them as ordinary text.

A tokenizer encodes `<|im_end|>` as the end of a turn, whether the chat template or the output of a tool wrote it.

    quoted(message)   replaces each control token in a text by a mark, which no text contains by chance
    render_chat       lets the chat template move, trim and join texts with their marks
    encode            turns the template's control tokens into tokens, and marked ones into ordinary tokens
    shown             returns the rendered text with the marks replaced, for messages

Marked texts are encoded by a copy of the tokenizer in which control tokens have secret spellings. The template's
control tokens are respelled, marks are replaced by the original text, and the whole text is encoded at once. Invariant:
a text without marks is encoded by the tokenizer itself, and a mark does not change the tokens around it.
"""

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from nemo_rl.data.interfaces import Message, TokenizerType
from nemo_rl.data.messages.content import TOOL_ROLES, TextRules

_FIRST_PRIVATE, _NUM_PRIVATE = 0xF0000, 0xFFFD
"""First of the characters for marks, and their number: a private use area of Unicode, which no normalizer changes."""
_WORD_JOINER = "\u2060"


def _secret() -> str:
    return "".join(chr(_FIRST_PRIVATE + secrets.randbelow(_NUM_PRIVATE)) for _ in range(6))


_MARK, _SPELLING = _secret(), _secret()
_MARKS = re.compile(f"{_MARK}(.)", re.DOTALL)


def is_marked(text: str) -> bool:
    """Return whether a text must be encoded by `ControlTokens.encode`."""
    return _MARK in text


class ControlTokens:
    """The control tokens of a tokenizer. `control_tokens_of` returns them.

    Args:
        tokenizer: tokenizer whose vocabulary and chat template determine the control tokens.
    """

    def __init__(self, tokenizer: TokenizerType) -> None:
        self._tokenizer = tokenizer
        # Tokenizers of other libraries may lack these attributes.
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        named = getattr(tokenizer, "all_special_tokens", ())
        special = [*named, *(str(token.content) for token in added if token.special)]
        self.special = _without_characters(special)
        """Tokens that the vocabulary marks as special."""
        template = str(tokenizer.chat_template or "")
        used = [str(token.content) for token in added if str(token.content) in template]
        self.written = _without_characters([*self.special, *used])
        """Special tokens, and added tokens such as `<tool_call>` that the chat template writes."""
        self._normalizes = any(token.normalized and str(token.content) in self.written for token in added)
        self._literals: dict[str, int] = {}
        self._by_number: list[str] = []
        self._find = {tokens: _any_of(tokens) for tokens in (self.special, self.written)}
        self._fragments = {tokens: _fragments(tokens) for tokens in (self.special, self.written)}
        self._respelled: Tokenizer | None = None

    def first_in(self, text: str, *, of_tools: bool = False) -> str | None:
        """Return the first special token in a text or, with `of_tools`, the first control token. None without one."""
        found = self._find[self.written if of_tools else self.special].search(text)
        return None if found is None else found[0]

    def special_in(self, text: str) -> list[tuple[int, str]]:
        """Return the position and the text of each special token in a text, in order."""
        return [(found.start(), found[0]) for found in self._find[self.special].finditer(text)]

    def quoted(self, message: Message, *, of_tools: bool) -> Message:
        """Return the message with a mark in place of each control token of its texts.

        Args:
            message: a message of any form that the chat template accepts.
            of_tools: whether to replace all control tokens, and not only special ones.
        """
        return self._quote(message, self.written if of_tools else self.special)

    def quoted_chat(self, messages: Sequence[Message], rules: TextRules) -> list[Message]:
        """Return the messages, with quoted texts where the rules require encoding as ordinary text."""
        return [self._by_role(message, rules) for message in messages]

    def quoted_tools(self, tools: list[dict[str, Any]] | None, rules: TextRules) -> list[dict[str, Any]] | None:
        """Return the tool descriptions of a row, quoted if the rules treat texts of rows as ordinary text."""
        return self._quote(tools, self.special) if rules.rows else tools

    def _by_role(self, message: Message, rules: TextRules) -> Message:
        if message.get("role") in TOOL_ROLES and rules.tools:
            return self.quoted(message, of_tools=True)
        return self.quoted(message, of_tools=False) if rules.rows else message

    def _quote(self, value: Any, tokens: tuple[str, ...]) -> Any:
        """Return a copy of mappings and lists with quoted texts. Return a value without control tokens unchanged."""
        if not tokens:
            return value
        if isinstance(value, str):
            return self._quote_text(value, tokens)
        if isinstance(value, Mapping):
            quoted = {self._quote(key, tokens): self._quote(below, tokens) for key, below in value.items()}
            return quoted if quoted != value else value
        if isinstance(value, list | tuple):
            below = [self._quote(item, tokens) for item in value]
            return below if below != list(value) else value
        return value

    def _quote_text(self, text: str, tokens: tuple[str, ...]) -> str:
        quoted = self._find[tokens].sub(lambda found: self._mark(found[0]), text)
        # # A fragment of a token at the end of a text could form a whole token with the adjacent text of the template.
        head, tail = self._fragments[tokens]
        begin = len(quoted) - len(quoted.lstrip())
        if found := head.match(quoted, begin):
            quoted = quoted[:begin] + self._mark(found[0]) + quoted[found.end() :]
        end = len(quoted.rstrip())
        if found := tail.search(quoted, max(0, end - len(tokens[0])), end):
            quoted = quoted[: found.start()] + self._mark(found[0]) + quoted[end:]
        if self._normalizes and self._holds_any(quoted, tokens):
            return "".join(character if character.isspace() else self._mark(character) for character in text)
        return quoted

    def _holds_any(self, text: str, tokens: tuple[str, ...]) -> bool:
        """Return whether the tokenizer finds control tokens in another spelling, such as `<EOS>` for `<eos>`."""
        numbers = {self._tokenizer.convert_tokens_to_ids(token) for token in tokens} - {self._tokenizer.unk_token_id}
        return not numbers.isdisjoint(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _mark(self, literal: str) -> str:
        number = self._literals.setdefault(literal, len(self._literals))
        if number == len(self._by_number):
            self._by_number.append(literal)
        return _MARK + chr(_FIRST_PRIVATE + number)

    def shown(self, text: str) -> str:
        """Return a text with the original texts instead of marks."""
        return _MARKS.sub(self._literal, text) if is_marked(text) else text

    def _literal(self, mark: re.Match[str]) -> str:
        number = ord(mark[1]) - _FIRST_PRIVATE
        return self._by_number[number] if 0 <= number < len(self._by_number) else ""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text with marks, without adding special tokens."""
        if not self._can_respell():
            # # Invisible characters prevent the tokenizer from recognising control tokens.
            broken = _MARKS.sub(lambda mark: _with_joiners(self._literal(mark)), text)
            return list(self._tokenizer(broken, add_special_tokens=False, verbose=False)["input_ids"])
        if self._respelled is None:
            self._respelled = _respelled(self._tokenizer.backend_tokenizer, self.written)
        own = self._find[self.written].sub(lambda found: _spelling(self.written.index(found[0])), text)
        return self._respelled.encode(self.shown(own), add_special_tokens=False).ids

    def _can_respell(self) -> bool:
        return isinstance(getattr(self._tokenizer, "backend_tokenizer", None), Tokenizer)


def control_tokens_of(tokenizer: TokenizerType) -> ControlTokens:
    """Return the control tokens of a tokenizer with its current vocabulary and template."""
    return _made(tokenizer, str(tokenizer.chat_template), len(getattr(tokenizer, "added_tokens_decoder", ())))


@lru_cache(maxsize=8)
def _made(tokenizer: TokenizerType, template: str, num_added: int) -> ControlTokens:
    return ControlTokens(tokenizer)


def _without_characters(tokens: Sequence[str]) -> tuple[str, ...]:
    """Return each token once, longest first. Single characters such as "!" are left out and remain ordinary text."""
    return tuple(sorted({token for token in tokens if len(token.strip()) > 1}, key=lambda token: (-len(token), token)))


def _any_of(tokens: Collection[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def _fragments(tokens: Collection[str]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return patterns of suffixes of control tokens at the start of a text, and of prefixes at its end."""
    ends = sorted({token[cut:] for token in tokens for cut in range(1, len(token))}, key=len, reverse=True)
    beginnings = sorted({token[:cut] for token in tokens for cut in range(1, len(token))}, key=len, reverse=True)
    tail = "|".join(map(re.escape, beginnings))
    return _any_of(ends), re.compile(f"(?:{tail})\\Z" if tail else "(?!)")


def _with_joiners(literal: str) -> str:
    return f"{_WORD_JOINER}{literal[:1]}{_WORD_JOINER}{literal[1:]}"


def _spelling(number: int) -> str:
    return _SPELLING + chr(_FIRST_PRIVATE + number)


def _respelled(tokenizer: Tokenizer, tokens: Sequence[str]) -> Tokenizer:
    """Return a copy of the tokenizer in which control tokens have other texts but the same ids."""
    description = json.loads(tokenizer.to_str())
    new = {token: _spelling(number) for number, token in enumerate(tokens)}
    for token in description["added_tokens"]:
        token["content"] = new.get(token["content"], token["content"])
    model = description["model"]
    model["unk_token"] = new.get(model.get("unk_token"), model.get("unk_token"))
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {new.get(token, token): number for token, number in vocabulary.items()}
    else:
        model["vocab"] = [[new.get(token, token), score] for token, score in vocabulary]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not _touches(pair, new)]
    description["truncation"] = description["padding"] = description["post_processor"] = None
    made = Tokenizer.from_str(json.dumps(description))
    made.encode_special_tokens = False
    for token in tokens:
        assert made.token_to_id(new[token]) == tokenizer.token_to_id(token), token
    return made


def _touches(pair: Sequence[str] | str, tokens: Collection[str]) -> bool:
    """Return whether a merge uses or produces one of the tokens."""
    left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
    return left in tokens or right in tokens or left + right in tokens
