"""Solutions and tests written by hand, each with the verdict that a reader gives: right or wrong.

`NAME` stands for a prefix that is another one in each row, so that many rows can be graded in one program.
"""

RIGHT: dict[str, tuple[str, str]] = {
    "function": ("def NAME(a, b): return a + b", "assert NAME(1, 2) == 3"),
    "lambda": ("NAME = lambda x: x * 2", "assert NAME(4) == 8"),
    "recursion": ("def NAME(n): return 1 if n < 2 else n * NAME(n - 1)", "assert NAME(20) == 2432902008176640000"),
    "keywords": ("def NAME(a, *, b=2): return a - b", "assert NAME(5, b=1) == 4 and NAME(5) == 3"),
    "exception of Python": (
        "def NAME(x):\n    if x < 0:\n        raise ValueError('negative')\n    return x",
        "try:\n    NAME(-1)\n    assert False, 'no error'\nexcept ValueError as error:\n"
        "    assert 'negative' in str(error)",
    ),
    "only an exception is demanded": (
        "def NAME(x): raise KeyError(x)",
        "try:\n    NAME(1)\n    assert 0\nexcept KeyError:\n    pass",
    ),
    "exception with else": (
        "def NAME(x): raise TypeError",
        "try:\n    NAME(1)\nexcept TypeError:\n    pass\nelse:\n    raise AssertionError('no error')",
    ),
    "exception inside of an assert": (
        "def NAME(x): raise ZeroDivisionError",
        "try:\n    assert NAME(1) is None\nexcept ZeroDivisionError:\n    pass\nelse:\n    assert False",
    ),
    "own exception": (
        "class NAMEError(Exception):\n    def __init__(self, need):\n        super().__init__(f'need {need}')\n"
        "        self.need = need\nclass NAMELow(NAMEError): pass\ndef NAME(n): raise NAMELow(n)",
        "try:\n    NAME(3)\n    assert False\nexcept NAMEError as error:\n"
        "    assert error.need == 3 and str(error) == 'need 3'",
    ),
    "not the exception of another handler": (
        "class NAMEError(LookupError): pass\ndef NAME(): raise NAMEError('x')",
        "try:\n    NAME()\nexcept ValueError:\n    assert False\nexcept LookupError:\n    pass",
    ),
    "an iterator that raises after items": (
        "def NAME(n): return map(lambda x: 60 // (n - x), range(9))",
        "found = []\ntry:\n    for x in NAME(5):\n        found.append(x)\nexcept ZeroDivisionError:\n"
        "    found.append(0)\nassert found == [12, 15, 20, 30, 60, 0]",
    ),
    "raise in a branch": ("def NAME(x): return x", "if NAME(3) != 3:\n    raise AssertionError('wrong')"),
    "assert 0 in a branch": ("def NAME(x): return x", "if NAME(3) != 3:\n    assert 0, 'wrong'"),
    "both branches have asserts": (
        "def NAME(x): return x",
        "import sys\nif sys.version_info >= (3,):\n    assert NAME(1) == 1\nelse:\n    assert NAME(1) == 2",
    ),
    "function of pytest": ("def NAME(x): return x + 1", "def test_NAME():\n    assert NAME(1) == 2"),
    "function of pytest that is called": (
        "def NAME(x): return x + 1",
        "def test_NAME():\n    assert NAME(1) == 2\ntest_NAME()",
    ),
    "class of pytest": (
        "def NAME(x): return x + 1",
        "class TestNAME:\n    def setup_method(self):\n        self.x = 1\n    def test_it(self):\n"
        "        assert NAME(self.x) == 2",
    ),
    "class of unittest": (
        "def NAME(x):\n    if not x: raise OverflowError\n    return x + 1",
        "import unittest\nclass NAMECase(unittest.TestCase):\n    def setUp(self):\n        self.x = 1\n"
        "    def test_a(self):\n        self.assertEqual(NAME(self.x), 2)\n"
        "    def test_b(self):\n        with self.assertRaises(OverflowError):\n            NAME(0)\n"
        "if __name__ == '__main__':\n    unittest.main()",
    ),
    "helper of the tests": (
        "def NAME(x): return x % 2 == 0",
        "def check_NAME(candidate):\n    assert candidate(2)\n    assert not candidate(3)\ncheck_NAME(NAME)",
    ),
    "name of a parameter of the tests": (
        "def NAME(x): return x",
        "def check_NAME(NAME):\n    assert NAME(2) == 2\ncheck_NAME(NAME)",
    ),
    "import from the solution": (
        "def NAME(x): return x",
        "from solution import NAME as NAME_own\nassert NAME_own(2) == 2",
    ),
    "module without an import": ("def NAME(x): return x ** 0.5", "assert math.isclose(NAME(2), 1.4142135623730951)"),
    "in place: sort": ("def NAME(a): a.sort()", "NAME_a = [3, 1]\nNAME(NAME_a)\nassert NAME_a == [1, 3]"),
    "in place: and the same object": (
        "def NAME(a):\n    a.append(1)\n    return a",
        "NAME_a = []\nassert NAME(NAME_a) is NAME_a and NAME_a == [1]",
    ),
    "in place: dict": (
        "def NAME(d): d['n'] = d.pop('o')",
        "NAME_d = {'o': 1}\nNAME(NAME_d)\nassert NAME_d == {'n': 1}",
    ),
    "in place: set": ("def NAME(s): s.add(4)", "NAME_s = {1}\nNAME(NAME_s)\nassert NAME_s == {1, 4}"),
    "in place: nested": (
        "def NAME(m):\n    m[0][0] = 9\n    m.append(m[0])",
        "NAME_m = [[1], [2]]\nNAME_r = NAME_m[0]\nNAME(NAME_m)\nassert NAME_m == [[9], [2], [9]] and NAME_r == [9]",
    ),
    "in place: rotate a matrix": (
        "def NAME(m): m[:] = [list(row) for row in zip(*m[::-1])]",
        "NAME_m = [[1, 2], [3, 4]]\nNAME(NAME_m)\nassert NAME_m == [[3, 1], [4, 2]]",
    ),
    "in place: keyword argument": (
        "def NAME(*, items): items.clear()",
        "NAME_i = [1]\nNAME(items=NAME_i)\nassert NAME_i == []",
    ),
    "in place: an object keeps its argument": (
        "class NAME:\n    def __init__(self, items): self.items = items\n    def add(self, x): self.items.append(x)",
        "NAME_i = []\nNAME(NAME_i).add(2)\nassert NAME_i == [2]",
    ),
    "in place: the test changes a result": (
        "class NAME:\n    def __init__(self): self.children = []\n    def size(self): return len(self.children)",
        "NAME_n = NAME()\nNAME_n.children.append(1)\nassert NAME_n.size() == 1",
    ),
    "constant": ("NAME = 3.5", "assert NAME == 3.5"),
    "constant that changes": (
        "NAME_n = 0\ndef NAME():\n    global NAME_n\n    NAME_n += 1",
        "NAME()\nNAME()\nassert NAME_n == 2",
    ),
    "len": ("class NAME:\n    def __len__(self): return 3", "assert len(NAME()) == 3"),
    "item": ("class NAME:\n    def __getitem__(self, i): return i * 2", "assert NAME()[4] == 8 and NAME()[-1] == -2"),
    "set an item": (
        "class NAME(object):\n    def __init__(self): self.d = {}\n    def __setitem__(self, k, v): self.d[k] = v\n"
        "    def __getitem__(self, k): return self.d[k]\n    def __delitem__(self, k): del self.d[k]",
        "NAME_b = NAME()\nNAME_b['a'] = 1\nassert NAME_b['a'] == 1\ndel NAME_b['a']\nassert NAME_b.d == {}",
    ),
    "str and repr": (
        "class NAME:\n    def __str__(self): return 's'\n    def __repr__(self): return 'r'",
        "assert str(NAME()) == 's' and repr(NAME()) == 'r' and f'{NAME()}{NAME()!r}' == 'sr'",
    ),
    "equality": (
        "class NAME:\n    def __init__(self, x): self.x = x\n"
        "    def __eq__(self, other): return isinstance(other, NAME) and self.x == other.x",
        "assert NAME(1) == NAME(1) and NAME(1) != NAME(2) and NAME(1) in [NAME(1)] and NAME(1) != 1",
    ),
    "hash": (
        "class NAME:\n    def __eq__(self, o): return type(o) is NAME\n    def __hash__(self): return 7",
        "assert len({NAME(), NAME()}) == 1 and {NAME(): 2}[NAME()] == 2 and hash(NAME()) == 7",
    ),
    "iteration": (
        "class NAME:\n    def __iter__(self):\n        yield from (1, 2, 3)",
        "assert list(NAME()) == [1, 2, 3] and sum(NAME()) == 6\nNAME_a, *NAME_b = NAME()\nassert NAME_b == [2, 3]",
    ),
    "iterator": (
        "class NAME:\n    def __init__(self): self.n = 0\n    def __iter__(self): return self\n"
        "    def __next__(self):\n        if self.n == 2: raise StopIteration\n        self.n += 1\n"
        "        return self.n",
        "assert list(NAME()) == [1, 2] and next(NAME()) == 1",
    ),
    "contains": ("class NAME:\n    def __contains__(self, x): return x == 2", "assert 2 in NAME() and 3 not in NAME()"),
    "truth": (
        "class NAME:\n    def __init__(self, x): self.x = x\n    def __bool__(self): return self.x > 0",
        "assert NAME(1) and not NAME(0)",
    ),
    "call": ("class NAME:\n    def __call__(self, x, *, y=0): return x + y", "assert NAME()(2, y=3) == 5"),
    "order": (
        "import functools\n@functools.total_ordering\nclass NAME:\n    def __init__(self, x): self.x = x\n"
        "    def __eq__(self, o): return self.x == o.x\n    def __lt__(self, o): return self.x < o.x",
        "assert NAME(1) < NAME(2) and NAME(2) >= NAME(2)\nassert [o.x for o in sorted([NAME(2), NAME(1)])] == [1, 2]\n"
        "assert max(NAME(1), NAME(3)).x == 3",
    ),
    "arithmetic": (
        "class NAME:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x\n"
        "    def __add__(self, o): return NAME(self.x + o.x)\n    def __mul__(self, k): return NAME(self.x * k)\n"
        "    __rmul__ = __mul__\n    def __neg__(self): return NAME(-self.x)\n"
        "    def __abs__(self): return abs(self.x)",
        "assert NAME(1) + NAME(2) == NAME(3) and 2 * NAME(2) == NAME(4) == NAME(2) * 2\n"
        "assert -NAME(1) == NAME(-1) and abs(NAME(-4)) == 4",
    ),
    "float and int": (
        "class NAME:\n    def __float__(self): return 2.5\n    def __int__(self): return 2",
        "assert float(NAME()) == 2.5 and int(NAME()) == 2",
    ),
    "with": (
        "class NAME:\n    log = []\n    def __enter__(self):\n        self.log.append('in')\n        return self\n"
        "    def __exit__(self, kind, error, place):\n        self.log.append('out')\n"
        "        return kind is ValueError",
        "with NAME() as NAME_c:\n    assert NAME_c.log == ['in']\n    raise ValueError\n"
        "assert NAME.log == ['in', 'out']",
    ),
    "context manager of a generator": (
        "import contextlib\n@contextlib.contextmanager\ndef NAME(a):\n    a.append(1)\n    yield 5\n    a.append(2)",
        "NAME_a = []\nwith NAME(NAME_a) as NAME_x:\n    assert NAME_x == 5\nassert NAME_a == [1, 2]",
    ),
    "attributes": (
        "class NAME:\n    def __init__(self): self.x = 1",
        "NAME_o = NAME()\nNAME_o.x = 4\nassert NAME_o.x == 4 and hasattr(NAME_o, 'x') and not hasattr(NAME_o, 'y')\n"
        "assert vars(NAME_o) == {'x': 4} and type(NAME_o).__name__ == 'NAME' and isinstance(NAME_o, NAME)",
    ),
    "property and class method": (
        "class NAME:\n    @property\n    def p(self): return 3\n    @classmethod\n    def c(cls): return cls()\n"
        "    @staticmethod\n    def s(): return 4",
        "assert NAME().p == 3 and NAME.c().p == 3 and NAME.s() == 4",
    ),
    "dataclass": (
        "from dataclasses import dataclass, field\n@dataclass\nclass NAME:\n    a: int\n"
        "    b: list = field(default_factory=list)",
        "NAME_d = NAME(1)\nNAME_d.b.append(2)\nassert NAME_d == NAME(1, [2]) and repr(NAME_d) == 'NAME(a=1, b=[2])'",
    ),
    "named tuple": (
        "from typing import NamedTuple\nclass NAME(NamedTuple):\n    x: int\n    y: int\n"
        "    def s(self): return self.x + self.y",
        "assert NAME(1, 2) == (1, 2) and NAME(1, 2).s() == 3 and NAME(1, 2).y == 2",
    ),
    "enumeration": (
        "import enum\nclass NAME(enum.Enum):\n    RED = 1\n    BLUE = 2",
        "assert NAME.RED.value == 1 and NAME(2) is NAME.BLUE and NAME['RED'] == NAME.RED and len(NAME) == 2",
    ),
    "list with a method": (
        "class NAME(list):\n    def push(self, x): self.append(x)",
        "NAME_s = NAME()\nNAME_s.push(4)\nassert NAME_s == [4] and len(NAME_s) == 1 and NAME_s[0] == 4",
    ),
    "linked list": (
        "class NAME:\n    def __init__(self, v, n=None): self.v, self.n = v, n\n"
        "def NAME_r(node):\n    last = None\n    while node: node.n, last, node = last, node, node.n\n    return last",
        "NAME_h = NAME_r(NAME(1, NAME(2)))\nassert (NAME_h.v, NAME_h.n.v, NAME_h.n.n) == (2, 1, None)",
    ),
    "objects of the tests": (
        "def NAME(node): return 0 if node is None else node.v + NAME(node.n)",
        "class NAME_Node:\n    def __init__(self, v, n=None): self.v, self.n = v, n\n"
        "assert NAME(NAME_Node(1, NAME_Node(2))) == 3",
    ),
    "function of the tests": (
        "def NAME(f, items): return [f(x) for x in items]",
        "assert NAME(lambda x: x + 1, [1, 2]) == [2, 3] and NAME(str, [1]) == ['1'] and NAME(abs, [-1]) == [1]",
    ),
    "decorator": (
        "import functools\ndef NAME(f):\n    @functools.wraps(f)\n    def inner(*a): return 2 * f(*a)\n"
        "    return inner",
        "@NAME\ndef NAME_f(x): return x + 1\nassert NAME_f(2) == 6 and NAME_f.__name__ == 'NAME_f'",
    ),
    "closure": (
        "def NAME():\n    n = 0\n    def count():\n        nonlocal n\n        n += 1\n        return n\n"
        "    return count",
        "NAME_c = NAME()\nassert (NAME_c(), NAME_c()) == (1, 2)",
    ),
    "generator": ("def NAME():\n    yield from (1, 2)", "assert list(NAME()) == [1, 2]"),
    "generator without end": (
        "def NAME():\n    n = 0\n    while True:\n        got = yield n\n        n = n + 1 if got is None else got",
        "from itertools import islice\nassert list(islice(NAME(), 40)) == list(range(40))\n"
        "NAME_g = NAME()\nassert next(NAME_g) == 0 and NAME_g.send(7) == 7",
    ),
    "its own StopIteration": (
        "def NAME(): raise StopIteration",
        "try:\n    NAME()\n    assert False\nexcept StopIteration:\n    pass",
    ),
    "coroutine": (
        "import asyncio\nasync def NAME(x):\n    await asyncio.sleep(0)\n    return x + 1",
        "import asyncio\nassert asyncio.run(NAME(2)) == 3",
    ),
    "what it prints": (
        "def NAME(x): print('hi', x)",
        "import io\nfrom contextlib import redirect_stdout\nNAME_b = io.StringIO()\nwith redirect_stdout(NAME_b):\n"
        "    NAME(3)\nassert NAME_b.getvalue() == 'hi 3\\n'",
    ),
    "nested tuples and types": (
        "def NAME(x): return x",
        "for NAME_v in (((1, (2,)), 'a'), {(1, 2): {3}}, b'x', 2j, None, 10 ** 400, float('inf')):\n"
        "    assert NAME(NAME_v) == NAME_v and type(NAME(NAME_v)) is type(NAME_v)",
    ),
    "defaultdict": (
        "from collections import defaultdict\ndef NAME(ws):\n    d = defaultdict(list)\n"
        "    for w in ws: d[w[0]].append(w)\n    return d",
        "assert NAME(['ab', 'ac']) == {'a': ['ab', 'ac']}",
    ),
    "many checks in a loop": (
        "def NAME(x): return x * x",
        "for NAME_x in range(50):\n    assert NAME(NAME_x) == NAME_x ** 2",
    ),
    "mark of byte order": ("\ufeffdef NAME(x): return x", "assert NAME(1) == 1"),
    "deep copy": (
        "class NAME:\n    def __init__(self): self.x = [1]",
        "import copy\nNAME_a = NAME()\nNAME_b = copy.deepcopy(NAME_a)\nNAME_b.x.append(2)\nassert NAME_a.x == [1]",
    ),
}

WRONG: dict[str, tuple[str, str]] = {
    "wrong value": ("def NAME(a, b): return a - b", "assert NAME(1, 2) == 3"),
    "None": ("def NAME(a): pass", "assert NAME(1) == 3"),
    "wrong type": ("def NAME(a): return '3'", "assert NAME(1) == 3"),
    "not there": ("", "assert NAME(1) == 3"),
    "not there, where KeyError is expected": (
        "",
        "try:\n    NAME(1)\n    assert False\nexcept KeyError:\n    pass",
    ),
    "no exception": (
        "def NAME(x): return x",
        "try:\n    NAME(-1)\n    assert False, 'no error'\nexcept ValueError:\n    pass",
    ),
    "no exception, and any is caught": (
        "def NAME(x): return x",
        "try:\n    NAME(-1)\n    assert False\nexcept Exception:\n    pass",
    ),
    "another exception": (
        "def NAME(x): raise KeyError",
        "try:\n    NAME(-1)\n    assert False\nexcept ValueError:\n    pass",
    ),
    "an exception instead of a value": ("def NAME(x): raise ValueError", "assert NAME(1) == 1"),
    "assert 0 in a branch": ("def NAME(x): return 3", "if NAME(4) != 2:\n    assert 0, 'wrong'"),
    "assert not 1 in a branch": ("def NAME(x): return 3", "if NAME(4) != 2:\n    assert not 1"),
    "raise in a branch": ("def NAME(x): return 3", "if NAME(4) != 2:\n    raise AssertionError"),
    "function of pytest": ("def NAME(x): return x", "def test_NAME():\n    assert NAME(1) == 2"),
    "function of pytest that raises": (
        "def NAME(x): return x",
        "def test_NAME():\n    if NAME(1) != 2:\n        raise ValueError",
    ),
    "class of pytest": (
        "def NAME(x): return x",
        "class TestNAME:\n    def test_it(self):\n        assert NAME(1) == 2",
    ),
    "class of unittest": (
        "def NAME(x): return x",
        "import unittest\nclass NAMECase(unittest.TestCase):\n    def test_a(self):\n"
        "        self.assertEqual(NAME(1), 2)",
    ),
    "unittest: no exception": (
        "def NAME(x): return x",
        "import unittest\nclass NAMECase(unittest.TestCase):\n    def test_a(self):\n"
        "        self.assertRaises(ValueError, NAME, 1)",
    ),
    "unittest: a part": (
        "def NAME(x): return x",
        "import unittest\nclass NAMECase(unittest.TestCase):\n    def test_a(self):\n        for n in (1, 2):\n"
        "            with self.subTest(n=n):\n                self.assertEqual(NAME(n), n + 1)",
    ),
    "a loop with one wrong round": (
        "def NAME(x): return x if x < 9 else 0",
        "for NAME_x in range(10):\n    assert NAME(NAME_x) == NAME_x",
    ),
    "a loop that the solution leaves empty": ("def NAME(): return []", "for NAME_x in NAME():\n    assert NAME_x > 0"),
    "an inner loop that the solution leaves empty": (
        "def NAME(): return []",
        "for NAME_x in NAME():\n    for NAME_y in NAME_x:\n        assert NAME_y",
    ),
    "in place: nothing changes": ("def NAME(a): sorted(a)", "NAME_a = [3, 1]\nNAME(NAME_a)\nassert NAME_a == [1, 3]"),
    "in place: a new list": ("def NAME(a): return sorted(a)", "NAME_a = [3, 1]\nNAME(NAME_a)\nassert NAME_a == [1, 3]"),
    "in place: what must not change": (
        "def NAME(a):\n    a.sort()\n    return a",
        "NAME_a = [3, 1]\nNAME(NAME_a)\nassert NAME_a == [3, 1]",
    ),
    "in place: another object": ("def NAME(a): return list(a)", "NAME_a = [1]\nassert NAME(NAME_a) is NAME_a"),
    "constant": ("NAME = 3.14", "assert NAME == 3.5"),
    "len": ("class NAME:\n    def __len__(self): return 4", "assert len(NAME()) == 3"),
    "no len": ("class NAME: pass", "assert len(NAME()) == 3"),
    "item": ("class NAME:\n    def __getitem__(self, i): return i", "assert NAME()[4] == 8"),
    "no text": ("class NAME: pass", "assert str(NAME()) == '(1, 2)'"),
    "equality by identity": ("class NAME:\n    def __init__(self, x): self.x = x", "assert NAME(1) == NAME(1)"),
    "unhashable": ("class NAME:\n    def __eq__(self, o): return True", "assert len({NAME()}) == 1"),
    "StopIteration ends no map": ("def NAME(n): raise StopIteration", "assert all(map(NAME, [2, 4]))"),
    "StopIteration ends no any": ("def NAME(n): raise StopIteration", "assert not any(map(NAME, [1, 3]))"),
    "StopIteration ends no list": ("def NAME(n): raise StopIteration", "assert list(map(NAME, [1, 3])) == []"),
    "StopIteration ends no loop": (
        "class NAME:\n    def __getitem__(self, i): raise StopIteration",
        "for NAME_x in NAME():\n    pass\nassert NAME",
    ),
    "equal to everything": (
        "class NAME_All:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n"
        "    def __hash__(self): return 0\ndef NAME(x): return NAME_All()",
        "assert NAME(3) == 9",
    ),
    "equal to everything, in a list": (
        "class NAME_All:\n    def __eq__(self, o): return True\ndef NAME(x): return [NAME_All()]",
        "assert NAME(3) == [9]",
    ),
    "equal to everything, on the right": (
        "class NAME_All:\n    def __eq__(self, o): return True\ndef NAME(x): return NAME_All()",
        "assert 9 == NAME(3)",
    ),
    "equal to everything, both of the solution": (
        "class NAME_All:\n    def __eq__(self, o): return True\ndef NAME(x): return NAME_All()",
        "assert NAME(3) == NAME(4)",
    ),
    "a number equal to everything": (
        "class NAME_All(int):\n    def __eq__(self, o): return True\n    def __index__(self): return 9\n"
        "def NAME(x): return NAME_All(5)",
        "assert NAME(3) == 9",
    ),
    "a list equal to everything": (
        "class NAME_All(list):\n    def __eq__(self, o): return True\n    def extra(self): pass\n"
        "def NAME(x): return NAME_All()",
        "assert NAME(3) == [9]",
    ),
    "a text equal to everything": (
        "class NAME_All(str):\n    def __eq__(self, o): return True\n    def __hash__(self): return hash('a')\n"
        "def NAME(x): return NAME_All('b')",
        "assert NAME(3) == 'a'",
    ),
    "larger than everything": (
        "class NAME_All:\n    def __gt__(self, o): return True\n    def __lt__(self, o): return True\n"
        "def NAME(x): return NAME_All()",
        "assert NAME(3) > 8",
    ),
    "larger than everything, between": (
        "class NAME_All:\n    def __gt__(self, o): return True\n    def __lt__(self, o): return True\n"
        "def NAME(x): return NAME_All()",
        "assert 8 < NAME(3) < 10",
    ),
    "near to everything": (
        "class NAME_All:\n    def __sub__(self, o): return 0.0\n    def __rsub__(self, o): return 0.0\n"
        "    def __abs__(self): return 0.0\ndef NAME(x): return NAME_All()",
        "assert abs(NAME(3) - 9.5) < 1e-6",
    ),
    "near to everything, in two steps": (
        "class NAME_All:\n    def __sub__(self, o): return self\n    def __abs__(self): return 0.0\n"
        "def NAME(x): return NAME_All()",
        "assert abs(NAME(3) - 9.5) < 1e-6",
    ),
    "contains everything": (
        "class NAME_All:\n    def __contains__(self, x): return True\ndef NAME(): return NAME_All()",
        "assert 5 in NAME()",
    ),
    "in everything": (
        "class NAME_All:\n    def __eq__(self, o): return True\n    def __hash__(self): return hash(9)\n"
        "def NAME(): return NAME_All()",
        "assert NAME() in (9, 10) or NAME() in {9}",
    ),
    "an exception equal to everything": (
        "class NAME_Error(Exception):\n    def __eq__(self, o): return True\ndef NAME(): raise NAME_Error",
        "assert NAME() == 3",
    ),
    "AssertionError as an answer": ("def NAME(): raise AssertionError('passed')", "assert NAME() == 3"),
    "an exit as an answer": ("def NAME(): raise SystemExit(0)", "assert NAME() == 3"),
    "an exit that is caught": (
        "import sys\ndef NAME():\n    try: sys.exit(0)\n    except SystemExit: return 0",
        "assert NAME() == 3",
    ),
    "other names of the tests": (
        "def NAME(): return 1\ndef NAME_check(f): return None\nsorted = lambda x: [1]\n",
        "def NAME_check(f):\n    assert f() == 2\nNAME_check(NAME)",
    ),
    "a deleted object": (
        "class NAME_D:\n    def __del__(self): raise SystemExit(0)\ndef NAME():\n    NAME_D()\n    return 1",
        "assert NAME() == 2",
    ),
    "a lying class": (
        "class NAME_M(type):\n    def __instancecheck__(cls, o): return True\n    def __eq__(cls, o): return True\n"
        "    def __hash__(cls): return 0\nclass NAME(metaclass=NAME_M): pass",
        "assert isinstance(3, NAME) or NAME == int",
    ),
    "a lying property": (
        "class NAME:\n    @property\n    def __class__(self): return int",
        "assert isinstance(NAME(), int)",
    ),
    "a changed argument": (
        "def NAME(f, x):\n    f.__code__ = (lambda x: 1).__code__\n    return 1",
        "def NAME_f(x): return 2 * x\nassert NAME(NAME_f, 3) == 6 or NAME_f(3) == 1",
    ),
    "globals of a function of the tests": (
        "def NAME(f): return f.__globals__['NAME_secret']",
        "NAME_secret = 42\nassert NAME(lambda: 0) == 42",
    ),
    "globals through a format": (
        "def NAME(f): return int('{0.__globals__[NAME_secret]}'.format(f))",
        "NAME_secret = 42\nassert NAME(lambda: 0) == 42",
    ),
    "globals of a function of the tests by a message of its own": (
        "import gc\ndef NAME_raw(f, do, *a):\n"
        "    peer = next(o for o in gc.get_objects() if type(o).__name__ == 'Server')\n"
        "    place = object.__getattribute__(f, '_remote_reference')\n"
        "    target = {'type': 'attribute', 'value': [place, '__globals__']}\n"
        "    peer._send({'do': do, 'target': target, 'arguments': peer._encode(a)})\n"
        "    return peer._decode(peer._receive().get('result'))\n"
        "def NAME(f):\n    NAME_raw(f, '__setitem__', 'NAME_secret', 1)\n"
        "    return NAME_raw(f, '__getitem__', 'NAME_secret')",
        "NAME_secret = 42\nassert NAME(lambda: 0) == NAME_secret",
    ),
    "a function of Python by a message of its own": (
        "import gc\ndef NAME(f):\n    peer = next(o for o in gc.get_objects() if type(o).__name__ == 'Server')\n"
        "    place = object.__getattribute__(f, '_remote_reference')\n"
        "    peer._send({'do': '__call__', 'target': place, 'arguments': {'type': 'tuple', 'value': [\n"
        "        {'type': 'builtin function', 'value': 'eval'}, \"globals().update(NAME_secret=3)\"]}})\n"
        "    peer._receive()\n    return 3",
        "NAME_secret = 42\nassert NAME(lambda g, x: g(x)) == NAME_secret",
    ),
    "class of an object of the tests": (
        "def NAME(o):\n    o.__class__.__eq__ = lambda s, t: True\n    return 3",
        "class NAME_O: pass\nassert NAME(NAME_O()) == NAME_O()",
    ),
    "a generator that stops early": ("def NAME():\n    yield 1", "assert list(NAME()) == [1, 2]"),
    "printing the answer": ("def NAME(): print(3)", "assert NAME() == 3"),
    "a tuple for a list": ("def NAME(): return (1, 2)", "assert NAME() == [1, 2]"),
    "off by one": ("def NAME(n): return list(range(n))", "assert NAME(3) == [1, 2, 3]"),
}
