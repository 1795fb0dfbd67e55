r"""Write word problems with large numbers, after two examples of how a calculator is called.

uv run --extra cpu python examples/use_cases/tool_data.py FOLDER

FOLDER/train.jsonl       {"problem": "Olga has 7890 cards and ...", "answer": "9553", "prompt": [{"role": ...}, ...]}
FOLDER/validation.jsonl  the same kinds of problems with people and things that are not in train.jsonl

A prompt is the examples and the problem.
"""

from typing import Any

import word_problems
from parts import write_parts

# A problem, the expression that solves it, and its value.
EXAMPLES = (
    ("There are 41 bags with 12 eggs in each. How many eggs are there in all?", "41 * 12", "492"),
    ("Sam has 81 cards and gives 13 of them away. How many cards are left?", "81 - 13", "68"),
)
ADDENDS, FACTORS = range(1000, 10000), range(100, 1000)


def examples() -> list[dict[str, Any]]:
    """Return a conversation in which each problem is solved with a call."""
    chat: list[dict[str, Any]] = []
    for problem, expression, value in EXAMPLES:
        call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
        chat += [
            {"role": "user", "content": problem},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": value},
            {"role": "assistant", "content": value},
        ]
    return chat


def make_rows(num_rows: int, part: int, seed: int) -> list[dict[str, Any]]:
    """Return rows with the arguments of `word_problems.make_rows`."""
    return [
        {
            "problem": row["prompt"],
            "answer": row["answer"],
            "prompt": [*examples(), {"role": "user", "content": row["prompt"]}],
        }
        for row in word_problems.make_rows(num_rows, part, seed, ADDENDS, FACTORS)
    ]


if __name__ == "__main__":
    write_parts(make_rows)
