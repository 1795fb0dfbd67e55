r"""Rewrite LaTeX and plain answers in one common spelling, and split answers where no bracket is open.

Invariant: `clean` changes the spelling of an answer, never its value, and every pattern here takes linear time.
"""

import re
from collections.abc import Iterator

_UNICODE = {
    "−": "-",
    "–": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "÷": "/",
    "π": r"\pi ",
    "θ": r"\theta ",
    "∞": r"\infty ",
    "∅": r"\emptyset ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\neq ",
    "±": r"\pm ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "°": r"^\circ ",
    "º": r"^\circ ",
    "½": r"\frac{1}{2}",
    "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}",
    "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}",
    "⅕": r"\frac{1}{5}",
    "⅛": r"\frac{1}{8}",
    "…": r"\ldots ",
    "’": "'",
    "\u00a0": " ",
    "\u2009": " ",
    "\u202f": " ",
}
_CHARACTERS = str.maketrans(_UNICODE)

DOLLAR = "\uff04"
"""Replacement for the currency sign, because a plain `$` begins mathematics."""

_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]{1,20}")
_RAISED_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_NUMBER_WORDS = {
    word: str(number)
    for number, word in enumerate(
        ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
    )
}
_POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_POWER_WORD = re.compile(rf"(?<=[\d}}])\s?(\\text\{{\s?)?({'|'.join(_POWERS_OF_TEN)})(?![A-Za-z])")
_NO_TEXT = re.compile(r"\\text\{\s?\}")
_ORDINAL = re.compile(r"(?<=\d)\s?(?:\^\s?)?\{?(?:\\text\{)?(?:st|[nr]d|th)\}{0,2}$")
_TIMES_SIGN = re.compile(r"(?<=\d)\s?[xX]\s?(?=10\s?\^)")
_OVER = re.compile(r"\{\s?([^{}]{1,60})\\over(?![A-Za-z])\s?([^{}]{1,60})\}")
_ROOT_ARGUMENT = re.compile(r"(\\sqrt\s?\[[^\[\]]{1,9}\])\s?(\w)")
_ROOT_SIGN = re.compile(r"√\s*(\w+|(?=[({]))")
_LOOSE_DOLLAR = re.compile(r"(?<!\\)\$(?=\s*[\d.])")
_MATH_SIGNS = re.compile(r"(?<!\\)(?:\$|\\[()\[\]])")
_THOUSANDS_GAP = re.compile(r"(?<=\d)(?:\{,\}|(?:\\!)?,\\!)(?=\d{3}(?!\d))")
_NO_MEANING = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|m?middle|displaystyle|textstyle|limits|mathstrut)(?![A-Za-z])|(?<!\\)\\!"
)
_SPACES = re.compile(r"(?<!\\)\\(?:[,;:> ]|quad(?![A-Za-z])|qquad(?![A-Za-z])|hspace\{[^{}]{0,20}\})|~")
_TEXT = re.compile(r"\\(?:text(?:normal|bf|it|rm|sf|tt)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|bf|rm)\s*(?=\{)")
_FRAC = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_FRAC_PARTS = re.compile(r"\\frac(?![A-Za-z])\s*|\\frac(?=[a-z]\s?[\da-z\\])")
_ARGUMENT = re.compile(r"\s*([^\W_]|\\[A-Za-z]+|\{)")
_INVISIBLE = re.compile(r"\\[hv]?phantom\s*(?:\{[^{}]{0,50}\}|\S)|^\s*(?:\\approx|\\sim|≈)")
_SQRT_DIGIT = re.compile(r"\\sqrt\s*(\d|[A-Za-z](?![A-Za-z]))")
_OVERLINE = re.compile(r"(?<=[.\d])\\(?:overline|bar|overbar|dot)\s*(?:\{(\d{1,60})\}|(\d))")
_DEGREE = re.compile(r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\(?:degree|textdegree)(?![A-Za-z])|\\deg\b")
_PLAIN_FUNCTION = re.compile(
    r"(?<![\\A-Za-z])(arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|exp)(?=\s*[(^{\d]|\s+[a-z]\b)"
)
_PHRASE = re.compile(r"^\s{0,9}\\text\{[^{}]{0,100}(?<![A-Za-z])(?:is|are|equals)\s?:?\s?\}(?=\s{0,9}\S)")
_PLAIN_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*(?=[({])")
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_INFINITY = re.compile(r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])|\\infin(?![A-Za-z])", re.IGNORECASE)
_AND = re.compile(
    r"\s*,?\s*(?:\\text\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\(?:lor|vee|land|wedge)(?![A-Za-z]))\s*"
)
_NAMES = {
    name: re.compile(rf"\\(?:{forms})(?![A-Za-z])")
    for name, forms in {
        r"\le ": "leq|leqslant|le",
        r"\ge ": "geq|geqslant|ge",
        r"\neq ": "ne|neq",
        "<": "lt",
        ">": "gt",
        r"\cdot ": "times|cdot|ast",
        "/": "div",
        ":": "colon",
        r"\{": "lbrace",
        r"\}": "rbrace",
        "(": "lparen|langle",
        ")": "rparen|rangle",
        "[": "lbrack",
        "]": "rbrack",
        r"\emptyset ": "varnothing|empty",
        r"\ldots ": "dots|ldots|cdots",
        "|": "lvert|rvert|vert",
    }.items()
}
MAX_DEPTH = 10
"""Largest number of nested brackets that are removed from around an answer."""

_OPENING, _CLOSING = "([{", ")]}"


def clean(answer: str) -> str:
    r"""Return an answer in the spelling that the other rules expect.

    Example:
        >>> clean(r"$\dfrac12\,$.")
        '\\frac{1}{2}'
    """
    text = _RAISED.sub(lambda raised: f"^{{{raised[0].translate(_RAISED_DIGITS)}}}", answer)
    text = _ROOT_SIGN.sub(lambda root: rf"\sqrt{{{root[1]}}}" if root[1] else r"\sqrt", text).translate(_CHARACTERS)
    text = text.replace(r"\$", DOLLAR)
    if len(re.findall(r"\$", text)) % 2:
        text = _LOOSE_DOLLAR.sub(DOLLAR, text, count=1)
    text = _MATH_SIGNS.sub(" ", text)
    text = _THOUSANDS_GAP.sub("", text)
    text = _SPACES.sub(" ", _INVISIBLE.sub("", _NO_MEANING.sub("", text)))
    text = _TEXT.sub(r"\\text", _FRAC.sub(r"\\frac", text))
    text = _DEGREE.sub(r"^\\circ ", text).replace(r"\%", "%")
    text = re.sub(r"\.{3,}", r"\\ldots ", text)
    for name, forms in _NAMES.items():
        text = forms.sub(name.replace("\\", "\\\\"), text)
    text = text.replace("**", "^").replace("*", r"\cdot ").replace("<=", r"\le ").replace(">=", r"\ge ")
    text = _TIMES_SIGN.sub(r"\\cdot ", _OVER.sub(r"\\frac{\1}{\2}", _ROOT_ARGUMENT.sub(r"\1{\2}", text)))
    text = _POWER_WORD.sub(lambda word: rf"\cdot 10^{{{_POWERS_OF_TEN[word[2]]}}}{word[1] or ''}", text)
    text = _NO_TEXT.sub(" ", text)
    text = _OVERLINE.sub(lambda line: rf"\overline{{{line[1] or line[2]}}}", text)
    text = _SQRT_DIGIT.sub(r"\\sqrt{\1}", _braced_fractions(text))
    text = _PI.sub(r"\\pi ", _INFINITY.sub(r"\\infty ", text))
    text = _PLAIN_ROOT.sub(r"\\sqrt", _PLAIN_FUNCTION.sub(r"\\\1 ", text))
    text = _ORDINAL.sub("", _trimmed(_PHRASE.sub("", _braced_roots(text), count=1)))
    return _NUMBER_WORDS.get(text.lower(), text)


def _trimmed(text: str) -> str:
    """Remove outer white space, final punctuation, and braces or a text command around everything."""
    for _ in range(MAX_DEPTH):
        before = text
        text = " ".join(text.split())
        text = text.rstrip(".,;: ").removesuffix("\\\\").strip()
        if text.startswith("{") and closing(text, 0) == len(text) - 1:
            text = text[1:-1]
        if text.startswith(r"\text{") and closing(text, 5) == len(text) - 1:
            text = text[6:-1]
        if text == before:
            break
    return text


def _braced_fractions(text: str) -> str:
    r"""Write `\frac12`, `\frac{1}2` and `\frac\pi 2` with braces."""
    pieces, position, ends = [], 0, _matching(text)
    for match in _FRAC_PARTS.finditer(text):
        if match.start() < position:
            continue
        pieces.append(text[position : match.start()] + r"\frac")
        position = match.end()
        for _ in range(2):
            found = _ARGUMENT.match(text, position)
            if found is None:
                break
            stop = ends.get(found.end() - 1, -1) if found[1] == "{" else found.end() - 1
            if stop < 0:
                break
            argument, position = text[found.start(1) : stop + 1], stop + 1
            pieces.append(argument if found[1] == "{" else f"{{{argument}}}")
    pieces.append(text[position:])
    return "".join(pieces)


def _braced_roots(text: str) -> str:
    r"""Write `\sqrt(2)` as `\sqrt{2}`."""
    ends, characters = _matching(text), list(text)
    for start in _starts(text, r"\sqrt("):
        if (stop := ends.get(start + 5)) is not None:
            characters[start + 5], characters[stop] = "{", "}"
    return "".join(characters)


def _matching(text: str) -> dict[int, int]:
    """Return the position of the closing bracket by the position of the opening bracket."""
    opened: list[int] = []
    ends: dict[int, int] = {}
    for position, char in enumerate(text):
        if char in _OPENING:
            opened.append(position)
        elif char in _CLOSING and opened:
            ends[opened.pop()] = position
    return ends


def closing(text: str, opened: int) -> int | None:
    """Return the position of the bracket that closes the one at `opened`, or None. Its kind does not matter."""
    depth = 0
    for position in range(opened, len(text)):
        char = text[position]
        if char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            depth -= 1
            if depth == 0:
                return position
    return None


def split_top(text: str, separators: str) -> list[str]:
    """Split a text at separators that are outside of all brackets and LaTeX environments, and strip the parts."""
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text):
        if char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            depth -= 1
        elif depth == 0 and char in separators:
            parts.append(text[start:position].strip())
            start = position + 1
    return [*parts, text[start:].strip()]


def with_commas(text: str) -> str:
    """Replace "and" and "or" between parts by commas."""
    return _AND.sub(", ", text)


def without_text(text: str) -> str:
    r"""Replace each `\text{...}` by its content, as plain words between spaces."""
    pieces, position = [], 0
    for start in _starts(text, r"\text{"):
        if start < position:
            continue
        stop = closing(text, start + 5)
        if stop is None:
            break
        pieces += [text[position:start], " ", text[start + 6 : stop], " "]
        position = stop + 1
    return " ".join("".join([*pieces, text[position:]]).split())


def _starts(text: str, part: str) -> Iterator[int]:
    start = text.find(part)
    while start >= 0:
        yield start
        start = text.find(part, start + len(part))


_LOOSE_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")


def squeezed(text: str) -> str:
    """Remove spaces, except between two digits, because `1 1/2` is not `11/2`."""
    return _LOOSE_SPACE.sub("", text)
