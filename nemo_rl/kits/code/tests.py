"""The tests of a problem, as they travel from a data set to the environment.

A row's answer, `ground_truth`, is the JSON text of one of two kinds of tests; `parse_tests` reads it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from nemo_rl.data.datasets.rows.program_tests import reason_against
from nemo_rl.utils.errors import DataError


@dataclass(frozen=True)
class CallTests:
    """Tests in Python that call what the solution defines."""

    tests: tuple[str, ...]
    """Source code of tests: `assert` statements, functions `test...`, classes of `unittest`. Each assert statement is a
    check, and so is a test without one; an exception outside of an assert is a failed check."""
    setup: str = ""
    """Source code that runs before them, such as imports and helper functions, which a solution cannot change."""
    names: tuple[str, ...] = ()
    """Names that `setup` defines too, but of which the tests use the solution's."""


@dataclass(frozen=True)
class OutputTests:
    """Tests of a whole program: what it prints for an input."""

    inputs: tuple[str, ...]
    """Texts of standard input."""
    outputs: tuple[str, ...]
    """The expected standard output for each; trailing white space of lines and of the end does not count."""


type Tests = CallTests | OutputTests


def tests_text(tests: Tests) -> str:
    """Return tests as the JSON text that `parse_tests` reads."""
    return json.dumps(asdict(tests))


def parse_tests(given: str | Mapping[str, Any]) -> Tests:
    """Return the tests of a JSON text, or of the mapping that it holds.

    Raises:
        DataError: It is neither kind of tests.
    """
    try:
        fields = json.loads(given) if isinstance(given, str) else dict(given)
        kind: type[CallTests] | type[OutputTests] = CallTests if "tests" in fields else OutputTests
        values: dict[str, Any] = {
            name: tuple(item) if isinstance(item, list) else item for name, item in fields.items()
        }
        tests = kind(**values)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"The tests of a sample are neither {{tests, setup, names}} nor {{inputs, outputs}} in JSON: {error}."
        ) from error
    if isinstance(tests, OutputTests) and len(tests.inputs) != len(tests.outputs):
        raise DataError(f"A sample has {len(tests.inputs)} inputs and {len(tests.outputs)} outputs.")
    if not (tests.tests if isinstance(tests, CallTests) else tests.inputs):
        raise DataError("A sample has no tests.")
    if isinstance(tests, CallTests) and (reason := _reason_against(tests)):
        raise DataError(f"The tests of a sample cannot judge a solution: {reason}.")
    return tests


@lru_cache(maxsize=1024)
def _reason_against(tests: CallTests) -> str | None:
    return reason_against(tests.tests, tests.setup, tests.names)
