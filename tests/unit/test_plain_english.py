"""The prose of the library: docstrings begin with a verb or a noun, so that they are understood at the first reading.

Words to avoid anywhere in a sentence are in `tools/plain_english.txt`, which codespell reads.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nemo_rl"
DICTIONARY = ROOT / "tools" / "plain_english.txt"

HEADLESS = {"anew", "behind", "beside", "of", "that", "those", "what", "whatever", "who", "whoever", "whom", "whose"}
"""First words of phrases without a subject or a verb: "What makes a run", "Of the phase"."""

NO_SUMMARY = HEADLESS | {"for", "how", "than", "where", "wherever", "whether", "which", "whichever", "why"}
"""First words that a docstring's summary avoids too; under a field, "How many rows ..." and "Whether ..." read well."""

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Found = tuple[int, str]


def _first_word(text: str) -> str:
    """The first word of a docstring in lower case, without quotes and punctuation."""
    match = re.match(r"[^\w]*([\w'-]*)", text)
    return match.group(1).lower() if match else ""


def _summaries(tree: ast.AST) -> Iterator[Found]:
    """Line and text of the docstring of each module, class and function."""
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def _field_notes(tree: ast.AST) -> Iterator[Found]:
    """Line and text of each string that stands under an assignment and documents it."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, after in zip(body, body[1:], strict=False):
            is_assignment = isinstance(before, ast.Assign | ast.AnnAssign | ast.TypeAlias)
            if is_assignment and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                yield after.lineno, str(after.value.value)


def _headless(file: Path, source: str) -> list[str]:
    """Report `file:line: first line of the text` for each text that begins with a word to avoid."""
    tree = ast.parse(source)
    found = [(line, text) for line, text in _summaries(tree) if _first_word(text) in NO_SUMMARY]
    found += [(line, text) for line, text in _field_notes(tree) if _first_word(text) in HEADLESS]
    return [f"{file}:{line}: {text.strip().splitlines()[0]}" for line, text in sorted(found)]


def test_docstrings_begin_with_a_verb_or_a_noun():
    found = [
        report
        for file in sorted(PACKAGE.rglob("*.py"))
        for report in _headless(file.relative_to(ROOT), file.read_text(encoding="utf8"))
    ]
    assert not found, (
        f"{len(found)} docstrings begin with a word that leaves the sentence without a subject or a verb. "
        "Write an imperative summary for a function ('Build the recipe.', 'Return whether ...') and a noun phrase for "
        "a class, a module or a field:\n" + "\n".join(found)
    )


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ('"""What makes a run."""', True),
        ('def f():\n    """Whether a file is there."""', True),
        ('class A:\n    """`Whose` rows these are."""', True),
        ('class A:\n    x: int\n    """Of the phase."""', True),
        ('"""Build a run."""', False),
        ('def f():\n    """Return whether a file is there."""', False),
        ('class A:\n    x: int\n    """Whether to write a file."""', False),
        ('x = "Of the phase."', False),
    ],
)
def test_what_the_check_finds(source: str, is_found: bool):
    assert bool(_headless(Path("a.py"), source)) is is_found


def test_the_dictionary_is_sorted_and_names_a_better_word_for_each():
    lines = DICTIONARY.read_text(encoding="utf8").splitlines()
    wrong = [line for line in lines if not re.fullmatch(r"[a-z_]+->[^,>]+(, [^,>]+)*,?", line)]
    assert not wrong, f"{DICTIONARY.relative_to(ROOT)}: write `word->instead` or `word->one, another,`, not {wrong}"
    assert lines == sorted(set(lines), key=str.encode), f"sort {DICTIONARY.relative_to(ROOT)} by bytes, without doubles"
