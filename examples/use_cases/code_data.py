r"""Write small programming problems, and programs of an author who forgets parentheses.

uv run --extra cpu python examples/use_cases/code_data.py FOLDER

FOLDER/demonstrations.jsonl  {"messages": [{"role": "user", "content": "f(x): add 4, then times 3"}, {...}]}
FOLDER/train.jsonl           {"problem": "f(x): add 4, then times 3", "tests": ["assert f(1) == 15", ...]}
FOLDER/test.jsonl            the same, of problems that are in neither of the other two files
"""

import argparse
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SHARE_OF_MISTAKES = 0.6
SHARE_FOR_TEST = 0.2
NUM_DEMONSTRATIONS = 4000
ARGUMENTS = (1, 2, 10)

Problem = tuple[str, int, int]
SIGNS = {"add": "+", "subtract": "-"}


def problems() -> list[Problem]:
    """Return every pair of a verb, the number it takes, and the factor."""
    return [(verb, number, factor) for verb in SIGNS for number in range(1, 10) for factor in range(2, 10)]


def statement(problem: Problem) -> str:
    """Say what the function does."""
    verb, number, factor = problem
    return f"f(x): {verb} {number}, then times {factor}"


def program(problem: Problem, is_right: bool) -> str:
    """Write the function in a fence, right or without the parentheses that it needs."""
    verb, number, factor = problem
    inner = f"x{SIGNS[verb]}{number}"
    value = f"({inner})*{factor}" if is_right else f"{inner}*{factor}"
    return f"```python\ndef f(x):\n    return {value}\n```"


def tests(problem: Problem) -> list[str]:
    """Return asserts that the program without parentheses fails."""
    verb, number, factor = problem
    signed = number if verb == "add" else -number
    return [f"assert f({argument}) == {(argument + signed) * factor}" for argument in ARGUMENTS]


def demonstrations(chosen: Sequence[Problem], generator: random.Random) -> Iterable[Mapping[str, Any]]:
    """Yield conversations, of which `SHARE_OF_MISTAKES` end with a wrong program."""
    for _ in range(NUM_DEMONSTRATIONS):
        problem = generator.choice(chosen)
        answer = program(problem, is_right=generator.random() >= SHARE_OF_MISTAKES)
        question = {"role": "user", "content": statement(problem)}
        yield {"messages": [question, {"role": "assistant", "content": answer}]}


def rows(chosen: Sequence[Problem]) -> Iterable[Mapping[str, Any]]:
    """Yield problems with their tests."""
    return ({"problem": statement(problem), "tests": tests(problem)} for problem in chosen)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the files; made if it does not exist")
    folder = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(0)
    every = problems()
    generator.shuffle(every)
    num_test = round(SHARE_FOR_TEST * len(every))
    files = {
        "demonstrations": demonstrations(every[num_test:], generator),
        "train": rows(every[num_test:]),
        "test": rows(every[:num_test]),
    }
    for name, lines in files.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
