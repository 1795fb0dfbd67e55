r"""Write prompts that ask for a format, and check whether an answer keeps to it.

uv run --extra cpu python examples/use_cases/instructions.py FOLDER

FOLDER/train.jsonl       {"prompt": "Name one of the animals. Answer with one word.", "rule": "one_word", ...}
FOLDER/validation.jsonl  the same rules with topics, words and keys that are not in train.jsonl

`follows` is the reward: a run finds it as `env.NAME.function: examples.use_cases.instructions.follows`.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]

TOPICS = (
    "a bicycle, the moon, rain, bread, a garden, the sea, a river, music, winter, a library, a lemon, coffee, a train, "
    "a forest, snow, a cat, a market, the wind, a bridge, chess, milk, a lamp, the desert, a kitchen, a horse, glass, "
    "a mountain, salt, a clock, the rainbow, a school, honey, a boat, gold, a candle, soup, a farm, cotton, a violin, "
    "paper, a dog, the city, a map, summer, football, a chair, an island, rice, a mirror, the night"
)
LISTS = (
    "animals, fruits, colours, rivers, countries, vegetables, sports, tools, planets, birds, drinks, insects, "
    "languages, trees, musical instruments, kinds of weather, jobs, school subjects, months, clothes"
)
WORDS = (
    "often, water, people, green, small, home, always, world, light, food, many, never, old, beautiful, work, together"
)
KEYS = "answer, name, item, choice, result, word, value, example"


def words(text: str) -> list[str]:
    """Return the words of a text, in lower case."""
    return re.findall(r"[a-z0-9']+", text.lower())


def is_sentence(answer: str, row: Row) -> bool:
    """Return whether an answer has at least four words and names its topic."""
    return len(words(answer)) >= 4 and words(row["topic"])[-1] in answer.lower()


def is_list(items: Sequence[str], count: int) -> bool:
    """Return whether there are so many items, all different and none without a word."""
    return len(items) == count == len({item.lower() for item in items}) and all(words(item) for item in items)


def is_lines(answer: str, row: Row, marks: Sequence[str]) -> bool:
    """Return whether an answer is exactly a list of `row["count"]` lines, each after the mark of its line."""
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    marked = len(lines) <= len(marks) and all(line.startswith(mark) for line, mark in zip(lines, marks, strict=False))
    return marked and is_list([line.partition(" ")[2] for line in lines], row["count"])


def is_json(answer: str, row: Row) -> bool:
    """Return whether an answer is a JSON object, alone or in a code block, with one key whose value is a text."""
    block = re.fullmatch(r"```(?:json)?\n(.*?)\n?```", answer, re.DOTALL)
    try:
        value = json.loads(block[1] if block else answer)
    except ValueError:
        return False
    return isinstance(value, dict) and list(value) == [row["word"]] and isinstance(value[row["word"]], str)


# Per rule: what it asks for, and whether an answer keeps to it.
RULES: dict[str, tuple[str, Callable[[str, Row], bool]]] = {
    "short": (
        "Describe {topic} in at most {count} words.",
        lambda answer, row: is_sentence(answer, row) and len(answer.split()) <= row["count"],
    ),
    "contains": (
        'Write one sentence about {topic} that contains the word "{word}".',
        lambda answer, row: is_sentence(answer, row) and row["word"] in words(answer),
    ),
    "lower": (
        "Describe {topic} in lower case letters, without capital letters.",
        lambda answer, row: is_sentence(answer, row) and answer == answer.lower(),
    ),
    "no_comma": (
        "Describe {topic} in one sentence without a comma.",
        lambda answer, row: is_sentence(answer, row) and "," not in answer and len(re.findall(r"[.!?]", answer)) == 1,
    ),
    "question": (
        "Ask a question about {topic}.",
        lambda answer, row: is_sentence(answer, row) and answer.count("?") == 1 and answer.endswith("?"),
    ),
    "one_word": (
        "Name one of the {items}. Answer with one word.",
        lambda answer, row: len(answer.split()) == 1 == len(words(answer)),
    ),
    "numbered": (
        "Write a numbered list of {count} {items}.",
        lambda answer, row: is_lines(answer, row, [f"{number}. " for number in range(1, 10)]),
    ),
    "bullets": (
        'List {count} {items} as bullet points. Use "-" for each bullet point.',
        lambda answer, row: is_lines(answer, row, 9 * ["- "]),
    ),
    "commas": (
        "Name {count} {items}, separated by commas, in one line.",
        lambda answer, row: "\n" not in answer and is_list(answer.split(","), row["count"]),
    ),
    "json": ('Write a JSON object with the key "{word}". Its value is one of the {items}.', is_json),
}


def follows(answer: str, row: Row) -> float:
    """Return 1 if an answer keeps to the rule of its row, else 0."""
    return float(RULES[row["rule"]][1](answer.strip(), row))


def make_rows(num_rows: int, part: int, seed: int) -> list[Row]:
    """Return rows in turn over the rules.

    Args:
        num_rows: number of rows.
        part: 0 takes four of five topics, lists, words and keys; 1 takes the others.
        seed: of the choices.
    """
    chosen = random.Random(seed)
    topics, items, texts, keys = (
        [text for index, text in enumerate(texts.split(", ")) if (index % 5 == 4) == part]
        for texts in (TOPICS, LISTS, WORDS, KEYS)
    )
    rows = []
    for index in range(num_rows):
        rule = list(RULES)[index % len(RULES)]
        row: Row = {
            "rule": rule,
            "topic": chosen.choice(topics),
            "items": chosen.choice(items),
            "word": chosen.choice(keys if rule == "json" else texts),
            "count": chosen.choice((8, 10, 12, 15) if rule == "short" else (3, 4, 5)),
        }
        rows.append({"prompt": RULES[rule][0].format(**row), **row})
    return rows


if __name__ == "__main__":
    from parts import write_parts

    write_parts(make_rows)
