"""Find the thinking of a sampled turn.

    tokens of a turn ─► ThinkingReader.read: tags ─► SampledTurn: blocks of thinking, final answer, tags out of place

A tag is a single token of the tokenizer (Qwen3's `<think>`), or a text that may consist of several tokens. Invariant:
only sampled tokens are read, and the last tokens before the turn, which may contain the opening tag.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from nemo_rl.config import RewardPenaltyConfig
from nemo_rl.utils.errors import ConfigError

_BEFORE = 64
"""Number of tokens before a turn that are searched for an opening tag. Only white space may follow the tag."""


class Tag(NamedTuple):
    """A thinking tag."""

    start: int
    """Position of the tag's first token in the turn."""
    end: int
    """Position after the tag's last token."""
    opens: bool
    """True if the tag opens the thinking, False if it closes the thinking."""


@dataclass(frozen=True)
class TaggedTokens:
    """Tokens with the thinking tags that they contain."""

    tags: Sequence[Tag]
    """Tags, in order."""
    gap: Callable[[int], str]
    """Function that returns the text between tag i - 1 and tag i, without special tokens. For i = 0 it returns the text
    before the first tag, and for i = number of tags the text after the last tag."""


class ThinkingReader(Protocol):
    """Interface of a reader that finds thinking tags."""

    def read(self, token_ids: Sequence[int]) -> TaggedTokens:
        """Find the tags among tokens."""


@dataclass(frozen=True)
class TokenTags:
    """Reader that finds tags that are single tokens (`ThinkingReader`)."""

    tokenizer: Any
    """Tokenizer that decodes the texts between tags."""
    open_id: int
    """Token that opens the thinking."""
    close_id: int
    """Token that closes the thinking."""

    def read(self, token_ids: Sequence[int]) -> TaggedTokens:
        """Find the tags among tokens, by their ids."""
        both = (self.open_id, self.close_id)
        tags = [Tag(at, at + 1, token == self.open_id) for at, token in enumerate(token_ids) if token in both]
        bounds = [0, *(bound for tag in tags for bound in (tag.start, tag.end)), len(token_ids)]

        def gap(number: int) -> str:
            return _decoded(self.tokenizer, token_ids[bounds[2 * number] : bounds[2 * number + 1]])

        return TaggedTokens(tags, gap)


@dataclass
class TextTags:
    """Reader that finds tags in the text of tokens (`ThinkingReader`).

    Each token is decoded separately, which shows the tokens of each tag. A character that consists of several tokens
    may be lost, but tags have no such characters.
    """

    tokenizer: Any
    """Tokenizer that decodes the tokens."""
    opening: str
    """Text that opens the thinking."""
    closing: str
    """Text that closes the thinking."""
    _pieces: dict[int, str] = field(default_factory=dict, init=False)

    def read(self, token_ids: Sequence[int]) -> TaggedTokens:
        """Find the tags among tokens, by their text."""
        pieces = [self._piece(token) for token in token_ids]
        text, ends = "".join(pieces), list(accumulate(map(len, pieces)))
        found = sorted((*_occurrences(text, self.opening), *_occurrences(text, self.closing)))
        tags = [
            Tag(bisect_right(ends, start), bisect_left(ends, end) + 1, text.startswith(self.opening, start))
            for start, end in found
        ]
        bounds = [0, *(bound for span in found for bound in span), len(text)]
        return TaggedTokens(tags, lambda number: text[bounds[2 * number] : bounds[2 * number + 1]])

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            whole = str(self.tokenizer.decode([token], skip_special_tokens=False))
            is_tag = whole in (self.opening, self.closing)
            self._pieces[token] = whole if is_tag else _decoded(self.tokenizer, [token])
        return self._pieces[token]


def _decoded(tokenizer: Any, token_ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


def _occurrences(text: str, tag: str) -> list[tuple[int, int]]:
    found, start = [], text.find(tag)
    while start >= 0:
        found.append((start, start + len(tag)))
        start = text.find(tag, start + len(tag))
    return found


class _Structure(NamedTuple):
    thinking: list[int]
    """Return the numbers of those texts between tags that are thinking."""
    malformed: list[tuple[int, int]]
    is_closed: bool


@dataclass(frozen=True)
class SampledTurn:
    """One sampled turn, with its thinking tags."""

    token_ids: Sequence[int]
    start: int
    """Position of the turn's first token in the sequence."""
    opened: bool
    """Whether the tokens before the turn have opened the thinking."""
    tagged: TaggedTokens
    """Tokens of the turn, with the tags among them."""

    @cached_property
    def _structure(self) -> _Structure:
        is_open, opened_by = self.opened, (max(len(self.token_ids) - 1, 0), len(self.token_ids))
        thinking, malformed = [], []
        for number, tag in enumerate(self.tagged.tags):
            if is_open:
                thinking.append(number)
            if tag.opens == is_open:
                malformed.append((tag.start, tag.end))
            elif tag.opens:
                opened_by = (tag.start, tag.end)
            is_open = tag.opens
        if is_open:
            thinking.append(len(self.tagged.tags))
            malformed.append(opened_by)
        return _Structure(thinking, sorted(malformed), not is_open)

    @property
    def malformed(self) -> list[tuple[int, int]]:
        """Start and end position in the turn of each misplaced tag.

        A tag is misplaced if it opens thinking that is open, closes thinking that is not open, or opens thinking that
        never ends. If thinking from before the turn is not closed, the turn's last token is reported.
        """
        return self._structure.malformed

    @property
    def reasoning(self) -> list[str]:
        """Texts of the thinking, in order."""
        return [self.tagged.gap(number) for number in self._structure.thinking]

    @property
    def final_answer(self) -> str:
        """Text after the last tag. It is all text if there is no tag, and empty if the thinking is not closed."""
        return self.tagged.gap(len(self.tagged.tags)) if self._structure.is_closed else ""

    @property
    def text(self) -> str:
        """Text without tags and special tokens."""
        return "".join(map(self.tagged.gap, range(len(self.tagged.tags) + 1)))

    @property
    def thinking_spans(self) -> list[tuple[int, int]]:
        """Start and end position in the turn of each block of thinking, without tags."""
        ends = [0, *(tag.end for tag in self.tagged.tags)]
        starts = [*(tag.start for tag in self.tagged.tags), len(self.token_ids)]
        return [(ends[number], max(starts[number], ends[number])) for number in self._structure.thinking]

    @property
    def num_thinking_tokens(self) -> int:
        """Number of tokens within the thinking."""
        return sum(end - start for start, end in self.thinking_spans)


def sampled_turns(
    reader: ThinkingReader, token_ids: Sequence[int], spans: Sequence[tuple[int, int]]
) -> list[SampledTurn]:
    """Read the sampled turns of a sequence.

    Args:
        token_ids: Tokens of the whole sequence.
        spans: Start and end position of each turn.
    """
    return [
        SampledTurn(
            token_ids[start:end],
            start,
            _is_opened(reader.read(token_ids[max(start - _BEFORE, 0) : start])),
            reader.read(token_ids[start:end]),
        )
        for start, end in spans
    ]


def _is_opened(before: TaggedTokens) -> bool:
    """Return whether an opening tag ends the tokens, apart from white space after it."""
    return bool(before.tags) and before.tags[-1].opens and not before.gap(len(before.tags)).strip()


def thinking_reader(config: RewardPenaltyConfig, tokenizer: Any) -> ThinkingReader:
    """Return the reader that finds the thinking tags of a configuration.

    Tags are found as tokens if both token ids are known, from `token_ids` or from a tokenizer with one token per tag.
    If `token_ids` gives neither id and the tokenizer lacks one of the tokens, tags are found as text.

    Raises:
        ConfigError: A token does not exist, or one id is given and the tokenizer has no token for the other tag.
    """
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    given = {"think_open": config.ids.think_open, "think_close": config.ids.think_close}
    tags = dict(zip(given, config.thinking_tags, strict=True))
    ids = {key: added.get(tags[key]) if value is None else value for key, value in given.items()}
    check_token_ids(tokenizer, {key: [] if value is None else [value] for key, value in given.items()})
    opening, closing = ids.values()
    if opening is not None and closing is not None:
        return TokenTags(tokenizer, opening, closing)
    if all(value is None for value in given.values()):
        return TextTags(tokenizer, *config.thinking_tags)
    missing = next(key for key, value in ids.items() if value is None)
    tag = tags[missing]
    raise ConfigError(
        f"reward_penalties.token_ids gives one thinking token, but {missing} is null and {tag!r} is not a token of the "
        f"tokenizer {getattr(tokenizer, 'name_or_path', '')!r}. Give both ids, or neither: tags of several tokens are "
        "found by their text (reward_penalties.thinking_tags)."
    )


def check_token_ids(tokenizer: Any, ids: dict[str, list[int]]) -> None:
    """Check that tokens exist.

    Args:
        ids: Token ids, by their key in `reward_penalties.token_ids`.

    Raises:
        ConfigError: A token is not in the vocabulary.
    """
    size = len(tokenizer) if hasattr(tokenizer, "__len__") else None
    for key, tokens in ids.items():
        for token in tokens:
            if size is not None and token >= size:
                raise ConfigError(
                    f"reward_penalties.token_ids.{key}: there is no token {token}; the tokenizer "
                    f"{getattr(tokenizer, 'name_or_path', '')!r} has the tokens 0 to {size - 1}."
                )
