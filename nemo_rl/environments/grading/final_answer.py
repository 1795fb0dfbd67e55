"""Find the final answer of a response in time that is linear in its length.

    boxes ─► the last one, or all that are listed next to each other
    no box ─► what follows "answer is" or "Answer:" ─► the last mathematics between delimiters ─► the last number

Invariant: in a run of similar characters, a pattern is tried at only one position, so that the time stays linear.
"""

import re
from collections import deque
from collections.abc import Iterator
from decimal import Decimal
from typing import NamedTuple

from nemo_rl.environments.grading.grade import VerifierResult

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s{0,9}\{")
_BRACE_OR_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s{0,9}\{|\\[\\{}]|\{+|\}+")
_LISTED = re.compile(
    r"\s{0,9}(?:\$\$?|\\[)\]])?\s{0,9}(?:,\s{0,9}(?:and|or)?|and|or|\\text\{\s?(?:and|or)\s?\})(?![a-z])\s{0,9}(?:\$\$?|\\[(\[])?\s{0,9}"
    r"(?:[A-Za-z]\s{0,9}=\s{0,9})?",
)
_STATED = re.compile(r"answers?(?:\s{1,9}(?:is|are)(?![a-z])|\s{0,9}\**\s{0,9}[:=])\**\s{0,9}:?", re.IGNORECASE)
_HOPE = re.compile(r"final answer is:?(.{1,200}?)\.?\s?I hope", re.IGNORECASE | re.DOTALL)
_NUMBER = re.compile(
    r"(?<![\w.])[-+−]?[$€£]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,9})?(?:\s?/\s?\d+)?\s?(?:\\?%)?"
)
_VALUE = re.compile(r"[\d\\$]")
_REASON = re.compile(r",? (?:not|because|since|so|as|which|where)(?![a-z])")
_SENTENCE_END = re.compile(r"\.(?=\s|$)|\n")
_DELIMITERS = ((r"\[", r"\]"), (r"\(", r"\)"), ("$$", "$$"), ("$", "$"))
_STATEMENT_CHARS = 1000
_MATH_CHARS = 2000
_TRIES = 20
_TAIL_CHARS = 5000
"""Number of characters at the end of a response in which an answer without a box is searched."""


class Box(NamedTuple):
    """A box with balanced braces. It holds no copy of its text, because boxes can be nested thousands of times."""

    start: int
    """Position of the backslash."""
    end: int
    """Position after the last brace."""
    text: str
    """Text that contains the box."""
    first: int
    """Position of the first character of the content, after white space."""
    last: int
    """Position after the last character of the content, before white space."""

    @property
    def content(self) -> str:
        """The stripped text inside the box."""
        return self.text[self.first : self.last]


def find_boxes(text: str) -> list[Box]:
    r"""Return all `\boxed{...}` and `\fbox{...}` with balanced braces, ordered by their starts."""
    boxes: list[Box] = []
    opened: list[tuple[int, int]] = []
    if _BOX.search(text) is None:
        return boxes
    for match in _BRACE_OR_BOX.finditer(text):
        token, place = match[0], match.start()
        if token[0] == "{":
            opened += [(-1, 0)] * len(token)
        elif token[0] == "}":
            for last in range(place, place + min(len(token), len(opened))):
                start, inner = opened.pop()
                if start >= 0:
                    boxes.append(Box(start, last + 1, text, *_stripped(text, inner, last)))
        elif len(token) > 2:
            opened.append((place, match.end()))
    return sorted(boxes, key=lambda box: box.start)


def _stripped(text: str, first: int, last: int) -> tuple[int, int]:
    """Return the bounds of a part of a text without the white space at its ends."""
    while first < last and text[first].isspace():
        first += 1
    while last > first and text[last - 1].isspace():
        last -= 1
    return first, last


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}` with balanced braces, stripped, or None."""
    boxes = find_boxes(text)
    return boxes[-1].content if boxes else None


def final_answer(response: str) -> str | None:
    """Return the text of the final answer, or None if the response states none.

    Boxes with nothing but a comma, "and" or "or" between them are one answer, which is a list.
    """
    boxes = _outer(find_boxes(response))
    if boxes:
        after = response[boxes[-1].end :]
        stated = _HOPE.search(after[-_STATEMENT_CHARS:])
        return (stated[1].strip() if stated else _listed(response, boxes)) or None
    tail = response[-_TAIL_CHARS:]
    return _stated(tail) or _last_mathematics(tail) or _last_number(tail)


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last match of a pattern, or None if there is none."""
    matches = deque(pattern.finditer(text), maxlen=1)
    return matches[0] if matches else None


def _outer(boxes: list[Box]) -> list[Box]:
    """Keep only the outer boxes, each with the content of the innermost last box in it."""
    outer: list[Box] = []
    for box in boxes:
        if outer and box.end <= outer[-1].end:
            around = outer[-1]
            if around.first < around.last and around.text[around.last - 1] == "}" and around.end - 1 >= box.end:
                outer[-1] = around._replace(first=box.first, last=box.last)
            continue
        outer.append(box)
    return outer


def _listed(response: str, boxes: list[Box]) -> str:
    contents = [boxes[-1].content]
    for box, following in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        if following.start - box.end > 60 or _LISTED.fullmatch(response, box.end, following.start) is None:
            break
        contents.append(box.content)
    return ", ".join(dict.fromkeys(contents[::-1]))


def _stated(response: str) -> str | None:
    """Return the text after the last "answer is" or "Answer:", or None if that text names no value."""
    found = last_match(_STATED, response)
    if found is None:
        return None
    statement = response[found.end() : found.end() + _STATEMENT_CHARS].strip()
    line = statement.partition("\n")[0].strip(" *")
    for opening, closing in _DELIMITERS:
        if statement.startswith(opening) and (stop := statement.find(closing, len(opening))) > 0:
            return statement[len(opening) : stop].strip()
    end = _SENTENCE_END.search(line)
    sentence = line[: end.start()] if end else line
    for opening, closing in _DELIMITERS:
        start = sentence.find(opening)
        stop = sentence.find(closing, start + len(opening)) if start >= 0 else -1
        if stop > 0:
            return sentence[start + len(opening) : stop].strip()
    sentence = sentence.strip(" *_")
    number = _NUMBER.match(sentence)
    if number is not None:
        return _whole_expression(sentence, number)
    goes_on = _VALUE.search(statement, len(sentence)) is not None and _VALUE.search(sentence) is None
    return None if goes_on else _REASON.split(sentence, maxsplit=1)[0] or None


def _whole_expression(sentence: str, number: re.Match[str]) -> str:
    """Return the sentence if little text follows its number, or else only the number."""
    return sentence if len(sentence) - number.end() < 30 and "," not in sentence[number.end() :] else number[0].strip()


def _last_mathematics(response: str) -> str | None:
    """Return the last text between delimiters of mathematics."""
    found = [pair for opening, closing in _DELIMITERS for pair in _last_pair(response, opening, closing)]
    return max(found)[1] if found else None


def _last_pair(response: str, opening: str, closing: str) -> Iterator[tuple[int, str]]:
    end = len(response)
    for _ in range(_TRIES):
        stop = response.rfind(closing, 0, end)
        if stop <= 0:
            return
        start = response.rfind(opening, max(stop - _MATH_CHARS, 0), stop)
        content = response[start + len(opening) : stop] if start >= 0 else ""
        if content.strip() and _is_mathematics(content, closing, response[stop + len(closing) :][:1]):
            yield stop, content.strip()
            return
        end = stop


def _is_mathematics(content: str, closing: str, after: str) -> bool:
    """Return whether a text between delimiters is mathematics, not the text between two prices with dollar signs."""
    return closing != "$" or not (content[-1].isspace() or after.isdigit() or "\n" in content)


def _last_number(response: str) -> str | None:
    found = last_match(_NUMBER, response)
    return found[0].strip() if found else None


_PLAIN_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,6})?")
_ANOTHER_BOX = re.compile(r"\\f(?:rame)?box")
_RIVAL_ANCHOR = re.compile(r"I hope", re.IGNORECASE)


def grade_plain_number(response: str, ground_truth: str) -> VerifierResult | None:
    r"""Grade a response exactly if the ground truth and the only boxed answer are plain numbers.

    A plain number has at most 15 digits before the point and 6 after it, no separators, units or leading zeros; for
    such numbers the rule for decimals is exact equality too. The full verifier grades a response with several boxes, or
    with the phrase "I hope" (which may follow another final answer).

    Returns:
        The result, or None if this response needs the full verifier.
    """
    truth = ground_truth.strip()
    if _PLAIN_NUMBER.fullmatch(truth) is None or response.count("\\boxed") != 1 or _ANOTHER_BOX.search(response):
        return None
    answer = last_boxed(response)
    if answer is None or _PLAIN_NUMBER.fullmatch(answer) is None:
        return None
    if _RIVAL_ANCHOR.search(response):
        return None
    return VerifierResult(float(Decimal(answer) == Decimal(truth)), answer)
