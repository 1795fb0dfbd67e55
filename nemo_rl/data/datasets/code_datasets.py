"""Read programming problems. The answer of a row consists of tests.

The answer, which becomes `ground_truth`, is a JSON text with the tests that the environment `code` reads
(`nemo_rl/kits/code/grading.py`). Prompts do not show the tests, unless the questions of the data set contain them.
"""

import ast
import builtins
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from nemo_rl.config import DatasetConfig
from nemo_rl.data.bad_rows import RowError
from nemo_rl.data.datasets.hub import AnsweredDataset, HubSource
from nemo_rl.data.datasets.raw_dataset import RawDataset, Row
from nemo_rl.data.datasets.rows.program_tests import reason_against
from nemo_rl.data.datasets.rows.values import kind_of, text_of, value_of

_TEST_COLUMNS = ("public_tests", "private_tests", "generated_tests")


DatasetFactory = Callable[[DatasetConfig, str], RawDataset]


class CodeDataset(AnsweredDataset):
    """Problems with tests of any kind, from any file or from CodeContests.

    The column `tests` (or `output_key`) holds Python's `assert` statements as a text or a list of texts, pairs
    `{"input": ..., "output": ...}` of standard input and output, or `{"inputs": [...], "outputs": [...]}`. Without this
    column, the tests of CodeContests are joined: `public_tests`, `private_tests` and `generated_tests`.
    """

    def columns(self) -> list[str]:
        """Return the columns of the question and of tests."""
        return [self.input_key, self.output_key, "description", *_TEST_COLUMNS]

    def to_messages(self, row: Row) -> list[dict[str, str]]:
        """Return the question, and the tests as the answer."""
        question = self.input_key if self.input_key in row else "description"
        return _messages(text_of(row, question), self.tests(row))

    def tests(self, row: Row) -> Mapping[str, Any]:
        """Return the tests of a row."""
        if row.get(self.output_key) is not None:
            return _any_tests(row[self.output_key])
        groups = [row[name] for name in _TEST_COLUMNS if isinstance(row.get(name), Mapping)]
        if not groups:
            raise RowError(f"no {self.output_key!r}")
        inputs, outputs = (list(chain.from_iterable(group[key] for group in groups)) for key in ("input", "output"))
        return _any_tests({"inputs": inputs, "outputs": outputs})


class HumanEvalDataset(AnsweredDataset):
    """The data set HumanEval. The question is the start of a program, which includes helpers of the function."""

    def columns(self) -> list[str]:
        """Return the columns of the program, of its tests and of the function's name."""
        return [self.input_key, "test", "entry_point"]

    def to_messages(self, row: Row) -> list[dict[str, str]]:
        """Return the start of the program, and the tests as the answer."""
        start, name = text_of(row, self.input_key), text_of(row, "entry_point")
        tests = {"tests": [f"{text_of(row, 'test')}\ncheck({name})\n"], "setup": start, "names": [name]}
        return _messages(f"Complete this Python program.\n```python\n{start.strip()}\n```", tests)


class MBPPDataset(AnsweredDataset):
    """The data set MBPP. The question shows only the first test, which names the function, as is usual."""

    def columns(self) -> list[str]:
        """Return the columns of the question, of the tests and of the reference solution."""
        return [self.input_key, "prompt", "test_list", "challenge_test_list", "test_setup_code", "test_imports", "code"]

    def to_messages(self, row: Row) -> list[dict[str, str]]:
        """Return the question with the first test, and all tests as the answer."""
        question = text_of(row, self.input_key if self.input_key in row else "prompt")
        tests = value_of(row, "test_list")
        if not isinstance(tests, list) or not tests:
            raise RowError("'test_list' is not a list of tests")
        setup = "\n".join([*(row.get("test_imports") or []), row.get("test_setup_code") or ""])
        every = [str(test) for test in [*tests, *(row.get("challenge_test_list") or [])]]
        names = _names_of_builtins(row.get("code") or "")
        return _messages(
            f"{question}\nYour program should pass this test:\n{tests[0]}",
            {"tests": every, "setup": setup, "names": names},
        )


def _messages(question: str, tests: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the question and the tests as messages."""
    if "tests" in tests:
        codes, setup, names = tests["tests"], tests.get("setup", ""), tests.get("names", ())
        if not all(isinstance(one, str) for one in (*codes, setup, *names)):
            raise RowError("the tests, their setup or their names are not texts")
        if reason := reason_against(codes, setup, names):
            raise RowError(reason)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": json.dumps(tests)}]


def _any_tests(given: Any) -> Mapping[str, Any]:
    """Return the tests, given in one of the forms that `CodeDataset` accepts."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return {"tests": [given]}
    if isinstance(given, Mapping) and "inputs" in given:
        return _output_tests(given["inputs"], given.get("outputs"))
    if isinstance(given, Mapping) and "tests" in given:
        return {key: given[key] for key in ("tests", "setup", "names") if key in given}
    if not isinstance(given, list) or not given:
        raise RowError(f"the tests are {kind_of(given)}, not a text, a list, or an object with 'inputs' and 'outputs'")
    if all(isinstance(one, str) for one in given):
        return {"tests": given}
    if all(isinstance(one, Mapping) and {"input", "output"} <= one.keys() for one in given):
        return _output_tests([one["input"] for one in given], [one["output"] for one in given])
    raise RowError("the list of tests has items that are neither texts nor objects with 'input' and 'output'")


def _output_tests(inputs: Any, outputs: Any) -> Mapping[str, Sequence[str]]:
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise RowError("'inputs' and 'outputs' are not two lists of one length")
    if not all(isinstance(one, str) for one in chain(inputs, outputs)):
        raise RowError("'inputs' and 'outputs' are not lists of texts")
    return {"inputs": inputs, "outputs": outputs}


def _names_of_builtins(code: str) -> list[str]:
    """Return the names of functions in a reference solution that are also built-ins, such as `sum`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about escape sequences in the code
        try:
            tree = ast.parse(code)
        except SyntaxError:
            return []
    return [one.name for one in tree.body if isinstance(one, ast.FunctionDef) and hasattr(builtins, one.name)]


def _named(kind: type[AnsweredDataset], source: HubSource) -> DatasetFactory:
    return partial(kind, source=source)


CODE_REGISTRY: dict[str, DatasetFactory] = {
    "humaneval": _named(
        HumanEvalDataset, HubSource("openai/openai_humaneval", "prompt", "test", split="test", validation_split="test")
    ),
    "mbpp": _named(
        MBPPDataset, HubSource("google-research-datasets/mbpp", "text", "test_list", ("full",), validation_split="test")
    ),
    "code_contests": _named(
        CodeDataset, HubSource("deepmind/code_contests", "problem", "tests", validation_split="test")
    ),
    "CodeDataset": _named(CodeDataset, HubSource(None, "problem", "tests")),
}
"""Factories of named data sets of programming problems. `CodeDataset` reads files of any name."""
