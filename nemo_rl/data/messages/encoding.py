"""Encode rendered text to token ids: prompts, conversations in spans, and texts that follow other tokens.

Invariant: no token crosses a position where a model begins or stops sampling. The tokens before such a position are
those of the prompt that an engine gets. The tokens after it continue the prompt, so a tokenizer that puts a word mark
before each text (SentencePiece) adds no mark there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import jinja2
import torch

from nemo_rl.data.interfaces import Message, TokenizerType
from nemo_rl.data.messages.control_tokens import control_tokens_of, is_marked
from nemo_rl.data.messages.template_form import for_template
from nemo_rl.utils.errors import DataError


def render_chat(
    messages: Sequence[Message],
    tokenizer: TokenizerType,
    *,
    add_generation_prompt: bool,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Render a chat to text with the tokenizer's chat template.

    Args:
        messages: Messages with `role` and `content`.
        tokenizer: Tokenizer with the chat template.
        add_generation_prompt: Whether the header of the next assistant turn follows.
        tools: Function schemas that the chat offers.
        template_kwargs: Variables for the template, which override those of `policy.tokenizer.chat_template_kwargs`.

    Raises:
        DataError: The tokenizer has no chat template, the template refuses the messages, or a part of a message is not
            text.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            f"tokenizer {tokenizer.name_or_path!r} has no chat template. Set "
            "policy.tokenizer.chat_template: null to send the bare text, a *.jinja file, or a "
            "template text."
        )
    optional: dict[str, Any] = ({} if tools is None else {"tools": tools}) | dict(template_kwargs or {})
    try:
        rendered = tokenizer.apply_chat_template(
            for_template(messages, tokenizer),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **optional,
        )
    except jinja2.TemplateError as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise DataError(
            f"the chat template of tokenizer {tokenizer.name_or_path!r} cannot render a chat "
            f"with the roles [{roles}]: {error}"
        ) from error
    return str(rendered)


def bind_template_kwargs(tokenizer: TokenizerType, kwargs: Mapping[str, Any]) -> None:
    """Set variables for the chat template in all chats that the tokenizer renders from now on."""
    bound = partial(tokenizer.apply_chat_template, **kwargs)
    tokenizer.apply_chat_template = bound  # type: ignore[method-assign]


def template_kwargs_of(tokenizer: TokenizerType) -> dict[str, Any]:
    """Return the variables that `bind_template_kwargs` has set for a tokenizer."""
    bound: Any = tokenizer.apply_chat_template
    return dict(bound.keywords) if isinstance(bound, partial) else {}


_CHARACTERS_PER_TOKEN = 8
_CUT_MARGIN = 512
"""Number of bytes that is larger than the longest token of any vocabulary."""

_WORD_MARKS = ("\u2581", "\u0120")
"""Characters by which vocabularies of SentencePiece and byte-level BPE represent the space before a word."""
_ANCHORS = ("\n", "0", ":", "a", " ")
"""Texts that precede a continuation. In any tokenizer, at least one of them ends with a token boundary."""

type Ids = list[int]


def encode_text(text: str, tokenizer: TokenizerType, longest: int | None = None) -> torch.Tensor:
    """Encode rendered text to token ids [T] int64, without adding special tokens.

    Args:
        text: Rendered text, with or without marks of `control_tokens`.
        longest: Largest number of tokens that the caller can use, or None for all. Of a longer text, only a prefix with
            more tokens than this may be encoded, because megabytes of text would need seconds and gigabytes of memory.
    """
    return torch.tensor(_encode_beginning(text, tokenizer, longest), dtype=torch.int64)


def encode_continuation(text: str, tokenizer: TokenizerType, longest: int | None = None) -> torch.Tensor:
    """Encode text that follows other tokens to token ids [T] int64. The arguments are those of `encode_text`."""
    return torch.tensor(_continuation(text, tokenizer, longest), dtype=torch.int64)


def encode_spans(
    text: str, ends: Sequence[int], sampled: Sequence[bool], tokenizer: TokenizerType, longest: int | None = None
) -> list[torch.Tensor]:
    """Encode a conversation to the token ids of each of its spans.

    The text is encoded as a whole, and the tokens are cut into spans. If a token crosses the beginning or end of a
    sampled span, or if the text before this position has other tokens when it is encoded alone, the two parts of the
    text are encoded separately.

    Args:
        ends: End of each span in characters, in order. The last one is the end of the text.
        sampled: For each span, whether a model samples it.
        longest: Argument of `encode_text`. The last spans of a longer text may get no tokens.

    Returns:
        One tensor [T] int64 for each span.
    """
    beginning = _encode_beginning(text, tokenizer, longest)
    if longest is not None and len(text) > _limit(longest) and len(beginning) > longest + _CUT_MARGIN:
        return _unequal_parts(beginning, len(ends))
    next_sampled = [*sampled[1:], False]
    hard = {end for end, *either in zip(ends, sampled, next_sampled, strict=True) if any(either)} | {len(text)}
    cutter = _Cutter(text, beginning, tokenizer)
    blocks = [(start, end, cutter.block(start, end)) for start, end in pairwise(sorted(hard | {0}))]
    return [torch.tensor(ids, dtype=torch.int64) for ids in _divide(text, ends, blocks, tokenizer)]


@dataclass(frozen=True)
class _Cut:
    """A position in the text, with the corresponding position in the tokens of the whole text."""

    index: int
    """Number of tokens of the whole text before the position."""
    ids: Ids | None = None
    """None if the position is between two tokens of the whole text, and a prompt that ends there has the same tokens.
    Otherwise, the tokens of the text from token `index` to the position."""


class _Cutter:
    """Cut the tokens of a text at positions between spans."""

    def __init__(self, text: str, ids: Ids, tokenizer: TokenizerType) -> None:
        self._text, self._ids, self._tokenizer = text, ids, tokenizer
        self._fixed = _places_of_special(text, ids, tokenizer)

    def block(self, start: int, end: int) -> Ids:
        """Return the tokens between two positions that tokens must not cross."""
        first, last = self._cut(start), self._cut(end)
        if first.ids is not None:
            return _continuation(self._text[start:end], self._tokenizer)
        if last.ids is None:
            return self._ids[first.index : last.index]
        if last.index >= first.index:
            return self._ids[first.index : last.index] + last.ids
        return last.ids[first.index - last.index :]

    def _cut(self, place: int) -> _Cut:
        if place == 0:
            return _Cut(0)
        if place == len(self._text):
            return _Cut(len(self._ids))
        begin, index = next(((at, index) for at, index in reversed(self._fixed) if at < place), (0, 0))
        ids = _encode(self._text[begin:place], self._tokenizer)
        if self._ids[index : index + len(ids)] == ids:
            return _Cut(index + len(ids))
        return _Cut(index, ids)


def _places_of_special(text: str, ids: Ids, tokenizer: TokenizerType) -> list[tuple[int, int]]:
    """Return the position of each special token in the text and in the tokens.

    No token is merged with them. The list is empty if text and tokens disagree, as when special tokens are normalized.
    """
    control = control_tokens_of(tokenizer)
    numbers = {token: tokenizer.convert_tokens_to_ids(token) for token in control.special}
    unknown = tokenizer.unk_token_id
    in_text = [(place, token) for place, token in control.special_in(text) if numbers[token] != unknown]
    known = set(numbers.values()) - {unknown}
    in_ids = [index for index, token in enumerate(ids) if token in known]
    if [numbers[token] for _, token in in_text] != [ids[index] for index in in_ids]:
        return []
    return [(place, index) for (place, _), index in zip(in_text, in_ids, strict=True)]


def _divide(
    text: str, ends: Sequence[int], blocks: Sequence[tuple[int, int, Ids]], tokenizer: TokenizerType
) -> list[Ids]:
    """Divide the tokens of blocks among spans. A token that crosses the end of a span belongs to the next span."""
    parts: list[Ids] = []
    for start, end, ids in blocks:
        inside = [place for place in ends[len(parts) :] if place <= end]
        used = 0
        for place in inside[:-1]:
            alone = _encode(text[start:place], tokenizer) if not start else _continuation(text[start:place], tokenizer)
            shared = max(used, _num_shared(alone, ids))
            parts.append(ids[used:shared])
            used = shared
        parts.append(ids[used:])
    return parts + [[] for _ in ends[len(parts) :]]


def _num_shared(left: Ids, right: Ids) -> int:
    """Return the length of the common prefix of two lists of tokens."""
    pairs = zip(left, right, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))


def _unequal_parts(ids: Ids, count: int) -> list[torch.Tensor]:
    """Return the tokens of a too long conversation. All tokens are in the first span."""
    return [torch.tensor(ids if part == 0 else [], dtype=torch.int64) for part in range(count)]


def _continuation(text: str, tokenizer: TokenizerType, longest: int | None = None) -> Ids:
    """Tokenize a text that continues other text, without the word mark (such as `▁`) of some tokenizers."""
    alone = _encode_beginning(text, tokenizer, longest)
    if not alone or not _marks_words(tokenizer) or not _has_word_mark(alone[0], text, tokenizer):
        return alone
    for anchor in _ANCHORS:
        before = _encode(anchor, tokenizer)
        ids = _encode_beginning(anchor + text, tokenizer, longest)
        rest = ids[len(before) :]
        if ids[: len(before)] == before and rest and not _has_word_mark(rest[0], text, tokenizer):
            return rest
    return alone


@lru_cache(maxsize=8)
def _marks_words(tokenizer: TokenizerType) -> bool:
    """Return whether the tokenizer puts a word mark before each text."""
    # Tokenizers of other libraries may have no such method.
    names = getattr(tokenizer, "convert_ids_to_tokens", None)
    first = _encode("a", tokenizer)[:1]
    return names is not None and bool(first) and str(names(first[0])).startswith(_WORD_MARKS)


def _has_word_mark(token: int, text: str, tokenizer: TokenizerType) -> bool:
    """Return whether the first token of a text begins with a word mark, although the text begins with no space."""
    name = str(tokenizer.convert_ids_to_tokens(token))
    return name.startswith(_WORD_MARKS) and not text.startswith((" ", _WORD_MARKS[0]))


def _limit(longest: int) -> int:
    """Return the number of characters above which only the beginning of a text is encoded."""
    return _CHARACTERS_PER_TOKEN * (longest + _CUT_MARGIN)


def _encode_beginning(text: str, tokenizer: TokenizerType, longest: int | None) -> Ids:
    if longest is not None:
        # # A token that is cut in the middle adds fewer tokens than the margin. If the prefix exceeds `longest` by more
        # than the margin, the whole text is also too long.
        end = _limit(longest)
        while end < len(text):
            beginning = _encode(text[:end], tokenizer)
            if len(beginning) > longest + _CUT_MARGIN:
                return beginning
            end *= _CHARACTERS_PER_TOKEN
    return _encode(text, tokenizer)


def _encode(text: str, tokenizer: TokenizerType) -> Ids:
    if is_marked(text):
        return control_tokens_of(tokenizer).encode(text)
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def begins_with_bos(tokenizer: TokenizerType) -> bool:
    """Return whether the tokenizer begins each text with its beginning-of-sequence token."""
    if tokenizer.bos_token is None:
        return False
    return list(tokenizer("a", verbose=False)["input_ids"])[:1] == [tokenizer.bos_token_id]


def with_bos(text: str, tokenizer: TokenizerType) -> str:
    """Return a rendered chat with the beginning-of-sequence token if the tokenizer adds it and the chat lacks it."""
    bos = tokenizer.bos_token
    return text if bos is None or text.startswith(bos) or not begins_with_bos(tokenizer) else bos + text
