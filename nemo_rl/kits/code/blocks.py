"""Find code in the text of a response.

Fences are paired as CommonMark pairs them (https://spec.commonmark.org/0.31.2/#fenced-code-blocks), line by line.
Invariant: the time is linear in the length of the text, for any text.
"""

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

OPENING, CLOSING = "<code>", "</code>"
_THINK, _END_OF_THOUGHT = "<think>", "</think>"
_LINE_BREAK = re.compile(r"\r\n|\r|\n")
_CONTAINER = re.compile(r"(?:[ \t]*(?:>|[-*+](?=[ \t])|\d{1,9}[.)](?=[ \t])))*+")
_FENCE = re.compile(r"([ \t]*)(?:(`{3,}+)([^`]*)|(~{3,}+)(.*))$")
_TAG = re.compile(rf"{_THINK}|{_END_OF_THOUGHT}|(?<!`){OPENING}")
_PYTHON = re.compile(r"[{.\s]*(?:i?python|py)[\d.]*\b", re.IGNORECASE)
_USUAL_INDENT = 3
_TAB = 4

type _Kind = Literal["fence", "code", "think", "end of thought"]


class _MarkedText(NamedTuple):
    """A marked part of a text."""

    kind: _Kind
    """Kind of the mark: a fence, `<code>`, `<think>`, or a `</think>` whose `<think>` is not in the text."""
    content: str = ""
    """Text inside the mark."""
    info: str = ""
    """Info string of the fence."""
    ends_text: bool = False
    """Whether only white space follows the marked part."""


def code_to_run(text: str) -> str | None:
    """Return the last block between `<code>` and `</code>`, or None if there is no block.

    The end of the text closes a block, because the closing tag may be a stop string that the text leaves out. A fence
    inside the tags is removed.
    """
    blocks = [piece.content for piece in _pieces_of_answer(text) if piece.kind == "code"]
    return _without_fence(blocks[-1]) if blocks else None


def final_code(text: str) -> str | None:
    """Return the last fenced block of Python, or else the last fenced block without a language, or else None.

    Blocks inside `<code>` do not count. Blocks in thinking text count only if no answer follows the thinking text.
    """
    return _last_program([piece for piece in _pieces_of_answer(text) if piece.kind == "fence"])


def any_code(text: str) -> str | None:
    """Return the result of `final_code`, or else the result of `code_to_run`, with one pass over the text."""
    pieces = _pieces_of_answer(text)
    blocks = [piece.content for piece in pieces if piece.kind == "code"]
    found = _last_program([piece for piece in pieces if piece.kind == "fence"])
    return found or (_without_fence(blocks[-1]) if blocks else found)


def without_mark(source: str) -> str:
    """Return source code without the byte order mark that some editors write at its beginning."""
    return source.removeprefix("\ufeff")


def _last_program(fences: list[_MarkedText]) -> str | None:
    python = [one for one in fences if _PYTHON.match(one.info)]
    unnamed = [one for one in fences if not one.info.strip()]
    last = next(iter(reversed(python or unnamed)), None)
    return None if last is None else without_mark(last.content)


def _without_fence(block: str) -> str:
    fences = [piece for piece in _Scanner(block, tags=False).pieces() if piece.kind == "fence"]
    found = _last_program(fences)
    return without_mark(block.strip("\r\n")) if found is None else found


def _pieces_of_answer(text: str) -> list[_MarkedText]:
    """Return the marked parts outside of thinking text, or the parts inside if nothing follows the thinking text."""
    start = _start_of_answer(text)
    pieces = list(_Scanner(text[start:]).pieces())
    ends = [number for number, piece in enumerate(pieces) if piece.kind == "end of thought"]
    answer = pieces[ends[-1] + 1 :] if ends and not pieces[ends[-1]].ends_text else pieces
    found = [piece for piece in answer if piece.kind in ("fence", "code")]
    thoughts = [piece for piece in answer if piece.kind == "think"]
    if found or not thoughts or not thoughts[-1].ends_text:
        return found
    return [piece for piece in _Scanner(thoughts[-1].content).pieces() if piece.kind in ("fence", "code")]


def _start_of_answer(text: str) -> int:
    """Return the position after the thinking that the prompt has opened, or 0 if the text has no such thinking.

    A `</think>` on a line of its own, with no `<think>` before it, ends such thinking, even if a fence is still open. A
    `</think>` inside a longer line may be a part of a program.
    """
    first = re.search(rf"{_THINK}|^[ \t]*{_END_OF_THOUGHT}[ \t]*\r?$", text, re.MULTILINE)
    if first is None or first.group() == _THINK or not text[first.end() :].strip():
        return 0
    return first.end()


class _Scanner:
    """Read a text once, from its beginning to its end."""

    def __init__(self, text: str, tags: bool = True) -> None:
        self._lines = _LINE_BREAK.split(text)
        self._tags = tags
        self._line = self._column = 0
        self._list_indent = 0
        last = next((number for number in range(len(self._lines) - 1, -1, -1) if self._lines[number].strip()), 0)
        self._end = last, len(self._lines[last].rstrip())

    def pieces(self) -> Iterator[_MarkedText]:
        """Yield the marked parts in their order."""
        while self._line < len(self._lines):
            line = self._lines[self._line]
            fence = self._fence_at(line) if self._column or "```" in line or "~~~" in line else None
            tag = _TAG.search(line, self._column) if self._tags and fence is None and "<" in line else None
            if fence is not None:
                yield self._fenced(fence)
            elif tag is None:
                self._note_list(line)
                self._line, self._column = self._line + 1, 0
            else:
                yield self._tagged(tag)

    def _tagged(self, tag: re.Match[str]) -> _MarkedText:
        self._column = tag.end()
        if tag.group() == _END_OF_THOUGHT:
            return _MarkedText("end of thought", ends_text=self._is_at_end())
        kind: _Kind = "think" if tag.group() == _THINK else "code"
        content = self._until(_END_OF_THOUGHT if kind == "think" else CLOSING)
        return _MarkedText(kind, content, ends_text=self._is_at_end())

    def _until(self, closing: str) -> str:
        """Return the text up to a closing tag or the end, and move the position after it."""
        parts: list[str] = []
        start = self._column
        while self._line < len(self._lines):
            line = self._lines[self._line]
            end = line.find(closing, start)
            if end >= 0:
                self._column = end + len(closing)
                return "\n".join([*parts, line[start:end]])
            parts.append(line[start:])
            self._line, start = self._line + 1, 0
        self._column = 0
        return "\n".join(parts)

    def _is_at_end(self) -> bool:
        return (self._line, self._column) >= self._end

    def _fence_at(self, line: str) -> re.Match[str] | None:
        """Return the opening fence at the current position, after marks of quotes and list items, or None."""
        container = _CONTAINER.match(line, self._column)
        fence = _FENCE.match(line, container.end() if container else self._column)
        if fence is None or (not self._column and container and container.end() == 0 and self._is_indented(fence)):
            return None
        return fence

    def _is_indented(self, fence: re.Match[str]) -> bool:
        return _width(fence.group(1)) > self._list_indent + _USUAL_INDENT

    def _fenced(self, opening: re.Match[str]) -> _MarkedText:
        """Return the block of a fence, which ends at the closing fence or at the end of the text."""
        run, info = opening.group(2) or opening.group(4), opening.group(3) or opening.group(5) or ""
        before = self._lines[self._line][self._column : opening.end(1)]
        quoted, indent = ">" in before, len(before.expandtabs(_TAB))
        most = max(self._list_indent, 0 if quoted else indent) + _USUAL_INDENT
        content: list[str] = []
        for number in range(self._line + 1, len(self._lines)):
            line = self._lines[number]
            if quoted:
                if not line.lstrip().startswith(">"):
                    self._line, self._column = number, 0
                    break
                line = line.lstrip()[1:].removeprefix(" ")
            if run in line and not line.strip().strip(run[0]) and _width(line) <= most:
                self._line, self._column = number + 1, 0
                break
            content.append(line)
        else:
            self._line, self._column = len(self._lines), 0
            content = content[:-1] if content and not content[-1] else content  # no line follows the last line break
        return _MarkedText("fence", _outdented(content, 0 if quoted else indent), info)

    def _note_list(self, line: str) -> None:
        """Remember the indentation of the content of the list item that begins on this line."""
        if not line.strip():
            return
        end = _CONTAINER.match(line).end()  # type: ignore[union-attr]  # the pattern matches every text
        if end and ">" not in line[:end]:
            self._list_indent = end + 1
        elif not line[0].isspace():
            self._list_indent = 0


def _width(line: str) -> int:
    """Return the width in columns of the white space at the beginning of a line."""
    if not line[:1].isspace():
        return 0
    return len(line[: len(line) - len(line.lstrip())].expandtabs(_TAB))


def _outdented(lines: list[str], columns: int) -> str:
    """Join lines to a text, after removing the indentation that all lines share, but at most `columns` columns."""
    if not columns:
        return "".join(f"{line}\n" for line in lines)
    columns = min([columns, *(len(line) - len(line.lstrip(" ")) for line in lines if line.strip())])
    return "".join(f"{line[columns:]}\n" for line in lines)
