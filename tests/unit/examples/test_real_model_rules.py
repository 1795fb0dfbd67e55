"""The rewards and data of the use cases with a real model, on answers that are graded by hand."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.data.messages.encoding import render_chat
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.kits.tools.calculator import calculator
from nemo_rl.kits.tools.found import find_tools
from nemo_rl.kits.tools.template import choose_parser

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples/use_cases"))

import gsm8k  # noqa: E402
import instructions  # noqa: E402
import own_answers  # noqa: E402
import tool_data  # noqa: E402
import word_problems  # noqa: E402
from parts import write_parts  # noqa: E402

ROW = {"topic": "the moon", "items": "animals", "word": "water", "count": 3}


def row_of(rule: str) -> dict[str, Any]:
    return ROW | {"rule": rule, "count": 5 if rule == "short" else 3}


@pytest.mark.parametrize(
    ("rule", "answer"),
    [
        ("short", "The moon shines at night."),
        ("contains", "The Moon has no water."),
        ("contains", "Water on the moon is ice."),
        ("lower", "the moon is made of stone."),
        ("no_comma", "The moon moves around the earth."),
        ("question", "How far away is the moon?"),
        ("one_word", "Dog"),
        ("one_word", "Dog."),
        ("numbered", "1. dog\n2. cat\n3. horse"),
        ("numbered", "1. dog\n\n2. cat\n\n3. horse\n"),
        ("bullets", "- dog\n- cat\n- horse"),
        ("commas", "Dog, cat, and horse"),
        ("json", '{"water": "dog"}'),
        ("json", '```json\n{\n  "water": "dog"\n}\n```'),
    ],
)
def test_answers_that_keep_to_their_rule(rule: str, answer: str) -> None:
    assert instructions.follows(answer, row_of(rule)) == 1


@pytest.mark.parametrize(
    ("rule", "answer"),
    [
        ("short", "The moon shines."),
        ("short", "The moon is a very big stone."),
        ("short", "It is a big stone."),
        ("contains", "The moon has waterfalls and stones."),
        ("lower", "The moon is made of stone."),
        ("no_comma", "The moon, a stone, moves around the earth."),
        ("no_comma", "The moon is big. It moves around the earth."),
        ("question", "How far is the moon? It is far away."),
        ("question", "How far is it to the sun?"),
        ("one_word", "A dog"),
        ("one_word", ""),
        ("one_word", "..."),
        ("numbered", "1. dog\n2. cat"),
        ("numbered", "1. dog\n3. cat\n2. horse"),
        ("numbered", "Animals:\n1. dog\n2. cat\n3. horse"),
        ("bullets", "- dog\n- cat\n- horse\n- cow"),
        ("bullets", "- dog\n- dog\n- dog"),
        ("bullets", "-dog\n-cat\n-horse"),
        ("bullets", "- \n- \n- "),
        ("commas", "dog, cat"),
        ("commas", "dog,\ncat,\nhorse"),
        ("commas", "dog, , horse"),
        ("json", '{"fire": "dog"}'),
        ("json", '{"water": "dog", "more": "cat"}'),
        ("json", '{"water": 3}'),
        ("json", '["water"]'),
        ("json", 'Here it is: {"water": "dog"}'),
        ("json", "{'water': 'dog'}"),
    ],
)
def test_answers_that_do_not(rule: str, answer: str) -> None:
    assert instructions.follows(answer, row_of(rule)) == 0


def test_validation_has_topics_lists_words_and_keys_of_its_own(tmp_path: Path) -> None:
    write_parts(instructions.make_rows, [str(tmp_path)])
    train, validation = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "validation")
    )
    assert (len(train), len(validation)) == (4000, 200)
    for key in ("topic", "items", "word"):
        assert not {row[key] for row in train} & {row[key] for row in validation}
    assert {row["rule"] for row in validation} == set(instructions.RULES)
    assert all("{" not in row["prompt"].replace("{}", "") for row in train)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("3 + 5 = 8", 1),
        ("He has 8 apples.", 1),
        ("8", 1),
        ("5 + 8 = 13", 0),
        ("eight", 0),
        ("", 0),
        ("0.8", 0),
        ("18", 0),
    ],
)
def test_the_last_number_counts(answer: str, reward: float) -> None:
    assert word_problems.right(answer, {"answer": "8"}) == reward


def test_problems_have_the_answers_that_their_numbers_give() -> None:
    rows = word_problems.make_rows(600, 0, 0)
    for row in rows:
        first, second = (int(text) for text in row["prompt"].replace(".", " ").split() if text.isdigit())
        text = row["prompt"]
        if "bags" in text:
            assert row["answer"] == str(first * second)
        elif "more. How" in text or "together" in text:
            assert row["answer"] == str(first + second)
        else:
            assert row["answer"] == str(first - second)
        assert int(row["answer"]) > 0
    validation = word_problems.make_rows(600, 1, 1)
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in validation}


def test_worked_answers_lose_the_marks_of_the_calculator() -> None:
    answer = "He sold 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = <<48+24=72>>72.\n#### 72"
    assert gsm8k.worked(answer) == "He sold 48/2 = 24 clips.\nIn all 48+24 = 72.\nThe answer is 72."


def test_gsm8k_is_read_from_local_files(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("test", 200)):
        rows = [
            json.dumps({"question": f"{part} {row}?", "answer": f"So <<1+1=2>>2.\n#### {row}"}) for row in range(count)
        ]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(rows))
    gsm8k.main([str(tmp_path / "rows"), "--source", str(tmp_path)])
    train, validation = ((tmp_path / f"rows/{name}.jsonl").read_text().splitlines() for name in ("train", "validation"))
    assert (len(train), len(validation)) == (3, 128)
    assert json.loads(train[1]) == {"input": "train 1?", "output": "So 2.\nThe answer is 1."}


def answer_of(index: int, reward: float | None, response: str, outcome: str = "finished") -> dict[str, Any]:
    prompt = f"<user>{'ab'[index]}?<assistant>"
    return {"idx": index, "prompt": prompt, "reward": reward, "response": response, "outcome": outcome}


def test_pairs_are_of_right_and_wrong_answers_to_one_prompt() -> None:
    answers = [
        answer_of(0, 1.0, "right"),
        answer_of(0, 0.0, "wrong"),
        answer_of(0, 0.0, "wrong too"),
        answer_of(0, 1.0, "right but long", "truncated"),
        answer_of(0, None, "not graded", "reward_error"),
        answer_of(1, 1.0, "right"),
    ]
    pair = {"prompt": "a?", "chosen": "right", "rejected": "wrong"}
    assert list(own_answers.pairs(answers, ["a?", "b?"])) == [pair]


def test_answers_to_other_prompts_are_refused() -> None:
    with pytest.raises(SystemExit, match="read other rows"):
        list(own_answers.pairs([answer_of(0, 1.0, "right")], ["b?", "a?"]))


def test_examples_of_calls_are_right_and_read_by_a_parser() -> None:
    rows = tool_data.make_rows(60, 0, 0)
    assert all(calculator(expression) == value for _, expression, value in tool_data.EXAMPLES)
    assert all(min(int(number) for number in re.findall(r"\d+", row["problem"])) >= 100 for row in rows)
    template = Path(tool_data.__file__).with_name("tool.jinja")
    tokenizer = get_tokenizer({"name": "examples/assets/tiny-chat", "chat_template": str(template)})
    schema = find_tools("calculator", {}, "it").specs["calculator"].schema
    assert choose_parser(None, tokenizer, [schema])[0].name == "pythonic"
    chat = render_chat(rows[0]["prompt"], tokenizer, add_generation_prompt=True, tools=[schema])
    assert '<|im_start|>assistant\n[calculator(expression="41 * 12")]<|im_end|>\n<|im_start|>tool\n492' in chat
    assert chat.endswith(f"<|im_start|>user\n{rows[0]['problem']}<|im_end|>\n<|im_start|>assistant\n")
