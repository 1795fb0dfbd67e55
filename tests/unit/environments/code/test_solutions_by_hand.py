"""Solutions written by hand get the verdict that a reader gives them.

The default test grades all rows in two programs; the long one grades each row by itself.
"""

import pytest
from solutions_by_hand import RIGHT, WRONG

from nemo_rl.data.datasets.rows.program_tests import reason_against
from nemo_rl.kits.code.grading import CallTests, SolutionGrader
from nemo_rl.sandbox import Limits, Sandbox, why_unavailable
from nemo_rl.sandbox.mechanisms import IN_ORDER

pytestmark = pytest.mark.skipif(all(why_unavailable(one) for one in IN_ORDER), reason="no sandbox works here")
ROWS = [(name, *row, True) for name, row in RIGHT.items()] + [(name, *row, False) for name, row in WRONG.items()]


@pytest.fixture(scope="module")
def grader():
    return SolutionGrader(Sandbox(Limits(wall_time_s=60, cpu_time_s=60)))


def named(text, number):
    return text.replace("NAME", f"Row{number}")


def graded_alone(grader, number, solution, test):
    return grader.grade(named(solution, number), CallTests((named(test, number),)))


def graded_together(grader, rows):
    """Grade rows in one program."""
    solution = "\n".join(named(code.removeprefix("\ufeff"), number) for number, (_, code, _, _) in enumerate(rows))
    tests = CallTests(tuple(named(test, number) for number, (_, _, test, _) in enumerate(rows)))
    return grader.grade(solution, tests)


def passing(grader, rows):
    """Return the names of the rows that pass a check alone."""
    return [name for name, code, test, _ in rows if graded_alone(grader, 0, code, test).num_passed]


def test_right_solutions_pass(grader):
    rows = [row for row in ROWS if row[-1]]
    verdict = graded_together(grader, rows)
    assert len(rows) >= 60 and verdict.num_checks >= len(rows)
    assert verdict.is_right, {row[0] for row in rows}.difference(passing(grader, rows))


def test_wrong_and_forging_solutions_pass_nothing(grader):
    rows = [row for row in ROWS if not row[-1]]
    verdict = graded_together(grader, rows)
    assert len(rows) >= 50 and verdict.num_checks >= len(rows)
    assert verdict.num_passed == 0, passing(grader, rows)


@pytest.mark.parametrize(("name", "solution", "test", "is_right"), ROWS)
def test_no_row_is_refused_when_it_is_loaded(name, solution, test, is_right):
    assert reason_against([named(test, 0)]) is None


@pytest.mark.long
@pytest.mark.parametrize(("name", "solution", "test", "is_right"), ROWS)
def test_each_solution_gets_its_verdict_alone(name, solution, test, is_right, grader):
    assert graded_alone(grader, 0, solution, test).is_right == is_right
