r"""Write word problems with small numbers, and check the last number of an answer.

uv run --extra cpu python examples/use_cases/word_problems.py FOLDER

FOLDER/train.jsonl       {"prompt": "Olga has 15 cards and buys 3 more. How many cards ...?", "answer": "18"}
FOLDER/validation.jsonl  the same kinds of problems with people and things that are not in train.jsonl

`right` is the reward: a run finds it as `env.NAME.function: examples.use_cases.word_problems.right`. `held_out.py` asks
a model these problems before and after a run that does not train them.
"""

import random
import re
from typing import Any

PEOPLE = (
    "Tom, Anna, Ben, Carla, David, Emma, Frank, Grace, Henry, Ida, Jack, Kate, Leo, Mia, Noah, Olga, Paul, Rosa, Sam, "
    "Tina"
)
THINGS = (
    "apples, books, coins, stamps, marbles, cards, shells, pens, cookies, stickers, balloons, eggs, flowers, keys, "
    "stones"
)

# Per kind: its text, and its result from the two numbers, of which the first is the larger one.
KINDS = (
    ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", int.__add__),
    ("{name} has {a} {things} and gives {b} of them away. How many {things} are left?", int.__sub__),
    ("{name} has {a} {things}. {other} has {b} {things}. How many {things} do they have together?", int.__add__),
    ("{name} found {a} {things} and lost {b} of them. How many {things} does {name} still have?", int.__sub__),
    ("There are {a} bags with {b} {things} in each. How many {things} are there in all?", int.__mul__),
    ("{name} has {a} {things} and {other} has {b}. How many more {things} does {name} have?", int.__sub__),
)


def right(answer: str, row: dict[str, Any]) -> float:
    """Return 1 if the last number of an answer is the row's answer, else 0."""
    numbers = re.findall(r"\d+(?:\.\d+)?", answer.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == row["answer"])


def make_rows(
    num_rows: int, part: int, seed: int, addends: range = range(2, 20), factors: range = range(2, 10)
) -> list[dict[str, Any]]:
    """Return rows in turn over the kinds.

    Args:
        num_rows: number of rows.
        part: 0 takes four of five people and things; 1 takes the others.
        seed: of the choices.
        addends: numbers of sums and differences.
        factors: numbers of products.
    """
    chosen = random.Random(seed)
    people, things = (
        [text for i, text in enumerate(texts.split(", ")) if (i % 5 == 4) == part] for texts in (PEOPLE, THINGS)
    )
    rows = []
    for index in range(num_rows):
        text, result = KINDS[index % len(KINDS)]
        name, other = chosen.sample(people, 2)
        b, a = sorted(chosen.sample(addends, 2))
        if result is int.__mul__:
            a, b = chosen.choice(factors), chosen.choice(factors)
        prompt = text.format(name=name, other=other, things=chosen.choice(things), a=a, b=b)
        rows.append({"prompt": prompt, "answer": str(result(a, b))})
    return rows


if __name__ == "__main__":
    from parts import write_parts

    write_parts(make_rows)
