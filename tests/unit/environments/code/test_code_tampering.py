"""Solutions that try to pass tests without solving anything: none may get a reward.

All run with the first mechanism of this machine; `tests/unit/sandbox` covers what no program may do at all.
"""

import pytest

from nemo_rl.kits.code.grading import CallTests, OutputTests, SolutionGrader
from nemo_rl.sandbox import Limits, Sandbox, choose_mechanism
from nemo_rl.utils.errors import SandboxError

LIMITS = Limits(wall_time_s=8, cpu_time_s=3, memory_mb=256, processes=8)
CALLS = CallTests(
    (
        "assert square(3) == 9",
        "assert sorted(squares([3, 2])) == [4, 9]",
        "import math\nassert math.isclose(square(0.5), 0.25)",
        "def check(candidate):\n    assert candidate(12) == 144, 'twelve'\ncheck(square)",
    ),
    setup="def helper(x): return x * x",
)
OUTPUTS = OutputTests(("3\n", "12\n"), ("9", "144"))
RIGHT = "def square(x): return x * x\ndef squares(xs): return [square(x) for x in xs]"
RIGHT_PROGRAM = "print(int(input()) ** 2)"
ANSWER = "\ndef square(x): return None\ndef squares(xs): return None\n"

TRICKS = {
    "end with success": "import sys; sys.exit(0)",
    "end with success in a call": "import os\ndef square(x): os._exit(0)\nsquares = square",
    "end the process": "import os; os._exit(0)",
    "raise an exit in a call": "def square(x): raise SystemExit(0)\nsquares = square",
    "equal to everything": """
class All:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __float__(self): return 0.25
    def __iter__(self): return iter([self, self])
    def __lt__(self, other): return True
def square(x): return All()
def squares(xs): return All()
""",
    "a number equal to everything": """
class All(int):
    def __eq__(self, other): return True
    def __index__(self): return 9
def square(x): return All(5)
def squares(xs): return [All(1), All(1)]
""",
    "a list equal to everything": """
class All(list):
    def __eq__(self, other): return True
def square(x): return All()
squares = square
""",
    "replace built-in functions": ANSWER
    + """
import builtins
builtins.sorted = lambda x: [4, 9]
builtins.AssertionError = Exception
""",
    "define the names of the tests": ANSWER
    + """
sorted = lambda x: [4, 9]
def check(candidate): pass
def helper(x): pass
def __count__(passed): pass
""",
    "replace a module": ANSWER + "import math; math.isclose = lambda *a: True; import sys; sys.modules['math'] = math",
    "read the callers": ANSWER
    + """
import sys
def square(x):
    frame = sys._getframe()
    while frame:
        for name, value in list(frame.f_locals.items()):
            if name in ('passed', 'failed', 'counts', 'tests'): return 9
        frame = frame.f_back
""",
    "find the tests among objects": ANSWER
    + """
import gc
def square(x):
    found = [o for o in gc.get_objects() if isinstance(o, dict) and 'tests' in o and 'setup' in o]
    return 9 if found else None
""",
    "read the files of the tests": ANSWER
    + """
import os, json
def square(x):
    for folder, _, names in os.walk('/'):
        for name in names:
            if name != 'tests.json': continue
            tests = json.load(open(os.path.join(folder, name)))['tests']
            return eval(tests[0].split('== ')[1])
""",
    "write a verdict into every file": ANSWER
    + """
import os, struct
for number in range(3, 200):
    try: os.pwrite(number, struct.pack('<QQQ?', 4, 0, 4, True), 0)
    except OSError: pass
    try: os.write(number, struct.pack('<QQQ?', 4, 0, 4, True) + b'\\n')
    except OSError: pass
""",
    "print a verdict": ANSWER + "print('4 passed'); print('OK'); print({'passed': 4, 'failed': 0})",
    "answer before it is asked": ANSWER
    + """
import os, sys
for _ in range(50): os.write(int(sys.argv[2]), b'{"ready": null}\\n')
""",
    "send what is no message": ANSWER + "import os, sys; os.write(int(sys.argv[2]), b'[' * 100000 + b'\\n')",
    "send an object of the tests": ANSWER
    + """
import os, sys
os.write(int(sys.argv[2]), b'{"ready": null}\\n')
for _ in range(9):
    os.write(int(sys.argv[2]), b'{"result": {"type": "name", "value": "__count__"}}\\n')
""",
    "close the pipes": "import os; os.closerange(3, 300)",
    "answer without end": ANSWER + "def squares(xs):\n    while True: yield 4",
    "hang in the first call": "import time\ndef square(x): time.sleep(100)\nsquares = square",
    "hang at the start": "import time; time.sleep(100)",
    "leave a child that answers": ANSWER + "import os\nif os.fork(): os._exit(0)",
    "change the exchange of values": ANSWER
    + """
import values
values.encode = lambda *a, **k: {'type': 'builtin', 'value': 'int'}
""",
    "change its server": ANSWER
    + """
import sys
for module in list(sys.modules.values()):
    for name in list(vars(module)):
        if name == 'Server':
            vars(module)[name].answer = lambda self, request: {'result': True}
""",
    "raise the error of a failed check": "def square(x): raise AssertionError('passed')\nsquares = square",
    "raise an error that claims success": """
class Passed(Exception):
    def __bool__(self): return True
def square(x): raise Passed
squares = square
""",
    "not a number": "def square(x): return float('nan')\ndef squares(xs): return [float('nan')] * 2",
    "a deep list": "def square(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a\nsquares = square",
    "a huge text": "def square(x): return 'x' * 10**8\nsquares = square",
    "end at exit with success": ANSWER + "import atexit, os; atexit.register(os._exit, 0)",
    "syntax error": "def square(",
    "nothing": "",
}


@pytest.fixture(scope="module")
def grader():
    try:
        mechanism = choose_mechanism("auto")
    except SandboxError as error:
        pytest.skip(str(error))
    return SolutionGrader(Sandbox(LIMITS, mechanism))


def test_a_right_solution_passes(grader):
    verdict = grader.grade(RIGHT, CALLS)
    assert (verdict.num_passed, verdict.num_checks) == (4, 4)
    assert grader.grade(RIGHT_PROGRAM, OUTPUTS).is_right


@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_passes_no_test(name, grader):
    verdict = grader.grade(TRICKS[name], CALLS)
    assert verdict.num_passed == 0 and verdict.num_checks >= 4


@pytest.mark.parametrize(
    "name", ["end with success", "print a verdict", "read the files of the tests", "equal to everything"]
)
def test_a_trick_prints_no_output_that_is_expected(name, grader):
    assert grader.grade(TRICKS[name], OUTPUTS).num_passed == 0


def test_partial_credit_counts_checks(grader):
    wrong_for_large = "def square(x): return x * x if x < 10 else 0\ndef squares(xs): return [square(x) for x in xs]"
    assert grader.grade(wrong_for_large, CALLS).share == 0.75
    assert grader.grade("print(9)", OUTPUTS).share == 0.5


def test_checks_after_a_solution_has_ended_are_failed_checks(grader):
    ends_at_twelve = "import os\ndef square(x): return x * x if x < 10 else os._exit(0)\n" + RIGHT.split("\n")[1]
    verdict = grader.grade(ends_at_twelve, CALLS)
    assert (verdict.num_passed, verdict.num_checks) == (3, 4)


def test_a_solution_cannot_take_back_a_check_by_loops_of_tests(grader):
    tests = CallTests(("for x in range(10):\n    assert square(x) == x * x",))
    verdict = grader.grade("def square(x): return x * x if x < 3 else 0", tests)
    assert (verdict.num_passed, verdict.num_checks) == (0, 1)


def test_constant_checks_are_worth_nothing(grader):
    tests = CallTests(("assert True, 'fine'\nassert square(2) == 4",))
    assert grader.grade(ANSWER, tests).share == 0


def test_values_of_many_types_cross(grader):
    code = """
from collections import Counter, OrderedDict, deque
from decimal import Decimal
from fractions import Fraction
import datetime
class Point:
    def __init__(self, x): self.x = x
def same(value): return value
def point(x): return Point(x)
def x_of(point): return point.x
def big(): return 7 ** 5000
def numbers(): yield from (1, 2)
"""
    tests = CallTests(
        (
            "for value in (None, True, 1.5, 'a', b'b', (1, 2), {1: (2,)}, {3}, frozenset({4}), 2j, range(3), int):\n"
            "    assert same(value) == value and type(same(value)) is type(value)",
            "assert big() == 7 ** 5000",
            "assert list(numbers()) == [1, 2]",
            "assert x_of(point(5)) == 5 and point(6).x == 6",
            "p = point(1); p.x = 3\nassert x_of(p) == 3",
            "assert point(1) != point(1)",
            "import decimal\nassert same(decimal.Decimal('1.5')) == decimal.Decimal('1.5')",
            "try:\n    x_of(3)\nexcept AttributeError:\n    assert same(1) == 1",
        )
    )
    verdict = grader.grade(code, tests)
    assert (verdict.num_passed, verdict.num_checks) == (8, 8)
