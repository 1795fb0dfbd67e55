"""Plant faults in the library, and find out which tier of the tests notices each.

    uv run --with cosmic-ray==8.7.0 tools/mutants.py choose --count 120 --seed 1     which faults
    uv run tools/mutants.py record -- -n 2                                           which tests execute their lines
    uv run --with cosmic-ray==8.7.0 tools/mutants.py run --minutes 20                goes on where it was
    uv run tools/mutants.py table
    uv run --with cosmic-ray==8.7.0 tools/mutants.py find                            what `.ci/run` finds

    choose ─► plan.json ─► record (runs the tests once) ─► hits.json ─► run ─► results.jsonl ─► table

A fault runs only the test functions that execute its line: first those of the default tier, fastest first, until one
fails; if none does, those of the full tier. A fault that the full tier kills and the default tier does not names a test
that `tests/tiers/representatives.txt` should list.

All files lie in `build/mutants`. The faults are made by cosmic-ray (https://cosmic-ray.readthedocs.io).
"""

import argparse
import ast
import json
import math
import os
import random
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools" / "line_recorder")]

from line_recorder import HITS, LINES, functions_by_line  # noqa: E402
from tiers import durations, reach  # noqa: E402

FOLDERS = (
    "losses",
    "models/policy",
    "models/dtensor",
    "weight_sync",
    "algorithms/rollout",
    "experience",
    "data",
)
"""Folders of `nemo_rl` that get faults, the same number each."""
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "FloorDiv", "Mod")
OPERATORS = (
    *(f"ReplaceBinaryOperator_{old}_{new}" for old in _ARITHMETIC for new in _ARITHMETIC if old != new),
    *("ReplaceComparisonOperator", "NumberReplacer", "AddNot", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceBreak", "ReplaceContinue", "ZeroIteration", "Delete_Not"),
)
"""Parts of the names of cosmic-ray's operators."""
FOUND_IN = ("losses", "models/policy", "models/dtensor", "weight_sync", "data")
"""Folders of `nemo_rl` with a fault for `find`."""
_FILES_AT_ONCE = 8
"""Test modules that `find` runs at once, the nearest first."""
_NO_TESTS = 5
"""Status with which pytest ends if no test was chosen."""
_START_S = 60.0
"""Seconds that a run of pytest may take besides its tests."""


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    file: str
    """Path, relative to the repository."""
    line: int
    """First line that differs."""
    operator: str
    """Name of cosmic-ray's operator."""
    occurrence: int
    """Number of the place among those that the operator could change in the file."""
    before: str
    """The line as it is."""
    after: str
    """The line with the fault."""

    @property
    def place(self) -> str:
        """The line, as tests are recorded for it."""
        return f"{self.file}:{self.line}"

    @property
    def key(self) -> tuple[str, str, int]:
        """The fault, as its results name it."""
        return self.place, self.operator, self.occurrence


def choose(folder: Path, count: int, seed: int) -> None:
    """Draw faults, and write them to `plan.json` and their lines to `lines.json`."""
    draw = random.Random(seed)
    chosen: list[Mutant] = []
    for number, part in enumerate(FOLDERS):
        share = count // len(FOLDERS) + (number < count % len(FOLDERS))
        places = [place for path in sorted((ROOT / "nemo_rl" / part).rglob("*.py")) for place in _places(path)]
        draw.shuffle(places)
        made = (mutant for place in places if (mutant := _mutant(*place, draw)) is not None)
        chosen += [mutant for mutant, _ in zip(made, range(share), strict=False)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps([asdict(mutant) for mutant in chosen], indent=1))
    lines: dict[str, list[int]] = {}
    for mutant in chosen:
        lines.setdefault(mutant.file, []).append(mutant.line)
    (folder / "lines.json").write_text(json.dumps(lines))
    sys.stdout.write(f"{len(chosen)} faults in {len(lines)} files: {folder / 'plan.json'}\n")


def _places(path: Path) -> Iterator[tuple[Path, list[tuple[str, int]]]]:
    """Yield for each changeable place of a file the operators and occurrences that change it."""
    import cosmic_ray.plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    source = path.read_text(encoding="utf-8")
    functions, ignored = _bodies(ast.parse(source)), _without_effect(ast.parse(source))
    tree = get_ast(source)
    found: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for name in sorted(cosmic_ray.plugins.operator_names()):
        if not any(part in name for part in OPERATORS):
            continue
        operator = cosmic_ray.plugins.get_operator(name)()
        occurrence = 0
        for node in ast_nodes(tree):
            for start, _ in operator.mutation_positions(node):
                if any(_is_in(start, part) for part in functions) and not any(_is_in(start, part) for part in ignored):
                    found.setdefault(start, []).append((name, occurrence))
                occurrence += 1
    for _, ways in sorted(found.items()):
        yield path, ways


type _Place = tuple[int, int]
type _Range = tuple[_Place, _Place]


def _is_in(place: _Place, part: _Range) -> bool:
    return part[0] <= place < part[1]


def _range(first: Any, last: Any) -> _Range:
    return (first.lineno, first.col_offset), (last.end_lineno, last.end_col_offset)


def _bodies(tree: ast.AST) -> list[_Range]:
    """Return the ranges of the bodies of functions: other code runs when a module is imported, by no test."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [_range(function.body[0], function.body[-1]) for function in functions]


def _without_effect(tree: ast.AST) -> list[_Range]:
    """Return the ranges of annotations, texts of errors and logs, and type aliases: no test can notice faults there."""
    ranges: list[_Range] = []
    for node in ast.walk(tree):
        parts: list[Any] = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.Raise | ast.TypeAlias | ast.JoinedStr):
            parts.append(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger."):
            parts.append(node)
        ranges += [_range(part, part) for part in parts if isinstance(part, ast.expr | ast.stmt)]
    return ranges


def _mutant(path: Path, ways: Sequence[tuple[str, int]], draw: random.Random) -> Mutant | None:
    name, occurrence = draw.choice(list(ways))
    source = path.read_text(encoding="utf-8")
    mutated = _mutated(source, name, occurrence)
    if mutated is None:
        return None
    pairs = list(zip(source.splitlines(), mutated.splitlines(), strict=False))
    differing = [number for number, (old, new) in enumerate(pairs, 1) if old != new]
    if not differing:
        return None
    old, new = pairs[differing[0] - 1]
    file = path.relative_to(ROOT).as_posix()
    return Mutant(file, differing[0], name.removeprefix("core/"), occurrence, old.strip(), new.strip())


def _mutated(source: str, operator: str, occurrence: int) -> str | None:
    """Return the source with a fault; None if Python cannot read it."""
    import cosmic_ray.plugins
    from cosmic_ray.mutating import MutationVisitor

    mutated = MutationVisitor.mutate_code(source, cosmic_ray.plugins.get_operator(operator)(), occurrence)
    try:
        ast.parse(mutated or "(")
    except SyntaxError:
        return None
    return str(mutated)


def record(folder: Path, arguments: Sequence[str]) -> None:
    """Run the tests, and write `hits.json`: for each line of a fault the functions that execute it.

    Tests that were recorded before stay recorded.
    """
    hits = folder / "hits"
    hits.mkdir(exist_ok=True)
    environment = os.environ | {LINES: str(folder / "lines.json"), HITS: str(hits)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "line_recorder", *arguments]
    # Not in PYTHONPATH, which tests set for the programs that they start.
    starter = Path(sysconfig.get_path("purelib")) / "line_recorder.pth"
    recorder = str(ROOT / "tools" / "line_recorder")
    starter.write_text(f"import sys; sys.path.append({recorder!r}); import line_recorder; line_recorder.start()\n")
    try:
        subprocess.run(command, cwd=ROOT, env=environment, check=False)
    finally:
        starter.unlink()
    found = {line: sorted(names) for line, names in functions_by_line(hits).items()}
    (folder / "hits.json").write_text(json.dumps(found, indent=1))
    planned = {mutant.place for mutant in _plan(folder)}
    sys.stdout.write(f"{len(planned & found.keys())} of {len(planned)} lines are executed by tests.\n")


def run(folder: Path, copies: int, limit_s: float, minutes: float) -> None:
    """Run the tests of each fault that has no result yet, each in a copy of the repository.

    A fault that no test found runs again after other tests were recorded that execute its line, and with a higher limit
    if tests were left out.
    """
    results = folder / "results.jsonl"
    hits: dict[str, list[str]] = json.loads((folder / "hits.json").read_text())
    done = {
        _key(result)
        for result in _results(folder)
        if result["killed_by"]
        or result["tests"] == len(hits.get(result["place"], []))
        and (result["left_out"] == 0 or result.get("limit_s", 0.0) >= limit_s)
    }
    tried = {_key(result) for result in _results(folder)}
    waiting = [mutant for mutant in _plan(folder) if mutant.key not in done]
    waiting.sort(key=lambda mutant: mutant.key in tried)  # new ones first
    free: Queue[Path] = Queue()
    for number in range(copies):
        free.put(_copy(folder / f"copy-{number}"))

    began = time.monotonic()

    def judge(mutant: Mutant) -> None:
        if time.monotonic() - began > 60 * minutes:
            return
        copy = free.get()
        try:
            verdict = _judge(mutant, hits.get(mutant.place, []), copy, limit_s)
        finally:
            free.put(copy)
        record = {"place": mutant.place, **asdict(mutant), **verdict}
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        sys.stdout.write(f"{mutant.place}: {mutant.after}\n  {verdict}\n")
        sys.stdout.flush()

    with ThreadPoolExecutor(copies) as pool:
        list(pool.map(judge, waiting))


def _key(result: dict[str, Any]) -> tuple[str, str, int]:
    return result["place"], result["operator"], result["occurrence"]


def _copy(path: Path) -> Path:
    """Make a clone of the repository's last commit, or bring an earlier clone there: it may have a fault still."""
    if not path.exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(path)], check=True)
        if not (shared := path.parent / "shared").exists():
            shared.symlink_to(ROOT.parent / "shared")
    subprocess.run(["git", "fetch", "--quiet", str(ROOT), "HEAD"], cwd=path, check=True)
    subprocess.run(["git", "reset", "--quiet", "--hard", "FETCH_HEAD"], cwd=path, check=True)
    return path


def _judge(mutant: Mutant, names: Sequence[str], copy: Path, limit_s: float) -> dict[str, Any]:
    """Return which tier kills a fault, by which test, and after how many seconds."""
    target = copy / mutant.file
    source = target.read_text(encoding="utf-8")
    mutated = _mutated(source, f"core/{mutant.operator}", mutant.occurrence)
    assert mutated is not None, "the plan is older than the repository"
    timed = sorted((_seconds(name), name) for name in names)
    tiers = {
        "default": [(s, name) for s, name in timed if not durations.is_full(*_split(name))],
        "full": [(s, name) for s, name in timed if durations.is_full(*_split(name))],
    }
    began = time.monotonic()
    try:
        target.write_text(mutated, encoding="utf-8")
        for tier, tests in tiers.items():
            chosen = _within(tests, limit_s)
            if chosen and (killer := _first_failure(copy, chosen)) is not None:
                return {"killed_by": tier, "test": killer, "seconds": round(time.monotonic() - began, 1)}
    finally:
        target.write_text(source, encoding="utf-8")
    left = sum(len(tests) - len(_within(tests, limit_s)) for tests in tiers.values())
    seconds = round(time.monotonic() - began, 1)
    return {"killed_by": None, "tests": len(timed), "left_out": left, "limit_s": limit_s, "seconds": seconds}


def _within(tests: Sequence[tuple[float, str]], limit_s: float) -> list[tuple[float, str]]:
    """Return the fastest tests that together take less than the limit, at least one."""
    chosen, total = [], 0.0
    for seconds, name in tests:
        total += seconds
        if chosen and total > limit_s:
            break
        chosen.append((seconds, name))
    return chosen


def _first_failure(copy: Path, tests: Sequence[tuple[float, str]]) -> str | None:
    """Run test functions until one fails; return its name, or None."""
    names = [name for _, name in tests]
    return _failed(copy, ["-m", "not long", *names], _START_S + 4 * sum(seconds for seconds, _ in tests))


def _failed(copy: Path, arguments: Sequence[str], allowed_s: float) -> str | None:
    """Run pytest until a test fails; return its name, or None."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", *arguments]
    with subprocess.Popen(
        command,
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=allowed_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return "no end"
    if process.returncode in (0, _NO_TESTS):
        return None
    failed = [line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if failed else f"pytest ended with {process.returncode}"


def find(folder: Path) -> None:
    """Plant a fault in each of five folders, and run the tests that its file reaches, nearest first, until one fails.

    The faults are the first ones that are known to change what a test sees. The tests are those of the default tier,
    then those that `--affected 7` chooses: the same that `.ci/run` runs, in the order of their distance.
    """
    plan = {mutant.key: mutant for mutant in _plan(folder)}
    killed = [plan[_key(result)] for result in _results(folder) if result["killed_by"]]
    out = sys.stdout
    out.write("| folder | fault | found by | minutes |\n|---|---|---|---|\n")
    for part in FOUND_IN:
        mutant = next(mutant for mutant in killed if mutant.file.startswith(f"nemo_rl/{part}/"))
        began = time.monotonic()
        found = _find(mutant, _copy(folder / "copy-0"))
        minutes = (time.monotonic() - began) / 60
        out.write(f"| {part} | `{mutant.place}`: `{mutant.after}` | {found or 'nothing'} | {minutes:.1f} |\n")
        out.flush()


def _find(mutant: Mutant, copy: Path) -> str | None:
    target = copy / mutant.file
    mutated = _mutated(target.read_text(encoding="utf-8"), f"core/{mutant.operator}", mutant.occurrence)
    assert mutated is not None, "the plan is older than the repository"
    target.write_text(mutated, encoding="utf-8")
    near = reach.distances(copy, [mutant.file])
    seconds = {file: sum(durations.stored().get(file.removeprefix("tests/"), {}).values()) for file in near}
    nearest = sorted(near, key=lambda file: (near[file], seconds[file]))
    for first in range(0, len(nearest), _FILES_AT_ONCE):
        chosen = nearest[first : first + _FILES_AT_ONCE]
        failed = _failed(copy, ["-m", "not full and not long", *chosen], _START_S + 4 * sum(map(seconds.get, chosen)))
        if failed is not None:
            return f"default tier: `{failed}`"
    failed = _failed(copy, ["--affected", "7", "--since", "HEAD"], 20 * 60.0)
    return None if failed is None else f"`--affected`: `{failed}`"


def _split(name: str) -> tuple[str, str]:
    file, _, function = name.partition("::")
    return file.removeprefix("tests/"), function.rpartition("::")[2]


def _seconds(name: str) -> float:
    file, function = _split(name)
    return durations.stored().get(file, {}).get(function, durations.SHORTEST_STORED_S / 2)


def table(folder: Path) -> None:
    """Print how many faults each tier kills, by folder, and each fault that the default tier lets live."""
    counts: dict[str, Counter[str]] = {part: Counter() for part in FOLDERS}
    hits: dict[str, list[str]] = json.loads((folder / "hits.json").read_text())
    out = sys.stdout
    lines = []
    for result in {_key(result): result for result in _results(folder)}.values():
        part = next(part for part in FOLDERS if result["file"].startswith(f"nemo_rl/{part}/"))
        verdict = result["killed_by"] or ("lives" if hits.get(result["place"]) else "not executed")
        counts[part][verdict] += 1
        if verdict != "default":
            lines.append(f"{verdict:<13} {result['place']}\n    {result['before']}\n    {result['after']}\n")
    out.write("| folder | faults | default tier | only full tier | lives | not executed |\n|---|---|---|---|---|---|\n")
    for part, count in [*counts.items(), ("all", sum(counts.values(), Counter[str]()))]:
        row = [count.total(), *(count[key] for key in ("default", "full", "lives", "not executed"))]
        out.write(f"| {part} | {' | '.join(map(str, row))} |\n")
    out.write("\n" + "".join(sorted(lines)))


def _plan(folder: Path) -> list[Mutant]:
    return [Mutant(**mutant) for mutant in json.loads((folder / "plan.json").read_text())]


def _results(folder: Path) -> list[dict[str, Any]]:
    path = folder / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants")
    commands = parser.add_subparsers(dest="command", required=True)
    chooser = commands.add_parser("choose")
    chooser.add_argument("--count", type=int, default=120)
    chooser.add_argument("--seed", type=int, default=1)
    commands.add_parser("record").add_argument("arguments", nargs=argparse.REMAINDER, help="of pytest, after --")
    runner = commands.add_parser("run")
    runner.add_argument("--copies", type=int, default=2)
    runner.add_argument("--limit-s", type=float, default=180.0, help="stored seconds of tests for a fault and tier")
    runner.add_argument("--minutes", type=float, default=math.inf, help="after these, start no further fault")
    commands.add_parser("table")
    commands.add_parser("find")
    given = parser.parse_args()
    folder = given.folder.resolve()
    match given.command:
        case "choose":
            choose(folder, given.count, given.seed)
        case "record":
            record(folder, [argument for argument in given.arguments if argument != "--"])
        case "run":
            run(folder, given.copies, given.limit_s, given.minutes)
        case "table":
            table(folder)
        case "find":
            find(folder)


if __name__ == "__main__":
    main()
