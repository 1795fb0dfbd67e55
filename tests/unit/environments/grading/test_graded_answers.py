"""Verdicts of a mathematician, and the time that hostile texts take."""

import time
from collections import defaultdict
from pathlib import Path

import pytest
from machine_speed import slowness

from nemo_rl.environments.grading.dapo import normalize_answer, verify_final_answer
from nemo_rl.environments.grading.final_answer import final_answer, find_boxes, grade_plain_number
from nemo_rl.environments.grading.hf_math_verify import verify_math, verify_math_components
from nemo_rl.environments.grading.multichoice import verify_english, verify_multilingual

FILE = Path(__file__).with_name("graded_answers.txt")


def read_triples() -> dict[str, list[tuple[str, str, float]]]:
    """Read kind -> (truth, response, reward) of the hand-written table."""
    triples = defaultdict(list)
    kind = ""
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            kind = line[3:]
        elif line[:1] in ("+", "-"):
            mark, _, rest = line.partition(" ")
            truth, _, answer = rest.partition(" ~~ ")
            response = answer if mark.endswith("!") else f"\\boxed{{{answer}}}"
            triples[kind].append((truth, response, float(mark[0] == "+")))
    return triples


TRIPLES = read_triples()


def test_the_table_has_many_wrong_answers():
    rewards = [reward for rows in TRIPLES.values() for _, _, reward in rows]
    assert len(rewards) >= 700
    assert rewards.count(0.0) >= 0.4 * len(rewards)


@pytest.mark.parametrize("kind", TRIPLES)
def test_answers_get_the_reward_of_a_mathematician(kind):
    wrong = [
        (truth, response, reward)
        for truth, response, reward in TRIPLES[kind]
        if verify_math(response, truth).reward != reward
    ]
    assert wrong == []


@pytest.mark.parametrize("kind", TRIPLES)
def test_where_plain_numbers_are_graded_without_sympy_the_reward_is_the_same(kind):
    for truth, response, reward in TRIPLES[kind]:
        verified = grade_plain_number(response, truth)
        assert verified is None or verified.reward == reward


@pytest.mark.parametrize("kind", TRIPLES)
def test_votes_never_merge_a_wrong_answer_with_the_truth(kind):
    merged = [
        (truth, response)
        for truth, response, reward in TRIPLES[kind]
        if reward == 0.0 and normalize_answer(truth) == normalize_answer(final_answer(response) or "")
    ]
    assert merged == []


@pytest.mark.parametrize("kind", TRIPLES)
def test_the_dapo_rule_rewards_no_wrong_answer(kind):
    rewarded = [
        (truth, response)
        for truth, response, reward in TRIPLES[kind]
        if reward == 0.0 and "\\boxed" in response and verify_final_answer(response, truth).reward == 1.0
    ]
    assert rewarded == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("\\frac{1}{2}", "\\dfrac12"),
        ("1,234", "1234"),
        ("1{,}234", "1\\,234"),
        ("5.00", "5"),
        ("$7$.", "7"),
        ("\\$5", "5"),
        ("\\text{east}", "east"),
        ("(1, 2)", "(1,2)"),
        ("\\left(1,2\\right)", "(1,2)"),
    ],
)
def test_spellings_of_one_answer_vote_together(first, second):
    assert normalize_answer(first) == normalize_answer(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("42\\text{ cm}", "42\\text{ km}"),
        ("5\\text{ dollars}", "5\\text{ cents}"),
        ("1 1/2", "11/2"),
        ("1\\ 1/2", "11/2"),
        ("A\\rightarrow B", "A\\leftarrow B"),
        ("0.\\overline{3}", "0.3"),
        ("x=1, y=2", "x=5, y=2"),
        ("a=b=2", "c=b=2"),
        ("(1,234)", "(1234)"),
        ("30^\\circ", "30\\text{ radians}"),
    ],
)
def test_different_answers_do_not_vote_together(first, second):
    assert normalize_answer(first) != normalize_answer(second)


@pytest.mark.parametrize(
    ("truth", "answer", "reward"),
    [
        ("x=5", "5", 1.0),
        ("5", "x=5", 1.0),
        ("x=5", "y=5", 0.0),
        ("50", "50\\%", 1.0),
        ("5", "5\\text{ cm}", 1.0),
        ("5\\text{ m}", "5\\text{ cm}", 0.0),
        ("x=1, y=2", "y=2", 0.0),
    ],
)
def test_a_name_or_a_unit_may_be_missing_under_the_dapo_rule(truth, answer, reward):
    assert verify_final_answer(f"Answer: {answer}", truth).reward == reward


@pytest.mark.parametrize(
    "truth", ["", "  ", "He has 3 + 4 = 7 apples.\n#### 7", "word " * 31, "So \\(x\\) is " + "very " * 30 + "large."]
)
def test_a_truth_that_no_answer_can_equal_is_an_error(truth):
    for verify in (verify_math, verify_final_answer):
        with pytest.raises(ValueError, match="ground truth"):
            verify("\\boxed{7} Answer: 7", truth)


def test_a_truth_may_be_a_solution_with_a_box():
    assert verify_math("\\boxed{7}", "We add 3 and 4.\nSo we have \\boxed{7} apples.").reward == 1.0
    assert verify_math("\\boxed{8}", "We add 3 and 4.\nSo we have \\boxed{7} apples.").reward == 0.0


def test_an_answer_that_is_too_long_to_compare_is_an_error():
    with pytest.raises(ValueError, match="5000 characters"):
        verify_math("\\boxed{" + "1+" * 2500 + "}", "7")


THOUGHT = "Two and two.\n</think>\n<answer>\\boxed{4}</answer>"


@pytest.mark.parametrize(
    ("prompt", "response", "reward"),
    [
        ("<|user|>2+2?<|assistant|><think>\n", THOUGHT, 1.0),
        ("<|user|>2+2?<|assistant|><think>", THOUGHT, 1.0),
        ("<|user|>2+2?<|assistant|><think>", "<think>" + THOUGHT, 0.0),
        ("<|user|>2+2?<|assistant|>", THOUGHT, 0.0),
        ("<|user|>What is <think>?<|assistant|>", THOUGHT, 0.0),
        ("<|user|>2+2?<|assistant|>", "<think>" + THOUGHT, 1.0),
        ("<|assistant|><think>\n\n</think>\n\n", "<answer>\\boxed{4}</answer>", 1.0),
        ("<|assistant|><think>\n\n</think>\n\n", THOUGHT, 0.0),
        ("", THOUGHT, 0.0),
        (None, THOUGHT, 1.0),
        (None, "<think>" + THOUGHT, 1.0),
        (None, "<think>" + THOUGHT + " And more.", 0.0),
        (None, "<answer>\\boxed{4}</answer>", 0.0),
        (None, "a</think>b</think><answer>4</answer>", 0.0),
    ],
)
def test_the_format_reward_knows_whether_the_prompt_opened_the_thinking(prompt, response, reward):
    assert verify_math_components(response, "4", prompt).reward["reward/format"] == reward


HOSTILE = [
    *("\\boxed{", "\\boxed{}", "\\fbox{", "\\boxed{1} and ", "{", "}", "\\", "(", "[", "$", "$ ", "\\[", "\\(", "$$"),
    *("1", "1 ", "1,", "1,234", "\\,", "-", "- ", "+", "1e", "1/", "1:", "x=", "x=1,", "<", "\\frac", "\\frac{", "a"),
    *("\\frac{1}{2}", "\\sqrt(", "\\text{", "\\text{a} ", "<think>", "</think>", "<answer>", "<answer></answer>", " "),
    *(
        "answer",
        "answer:",
        "answer is ",
        "Answer: A",
        "final answer is ",
        "The final answer is $1$. I hope ",
        "*",
        "\n",
    ),
    *("A ", "and ", "\\pm", "\\cup", "^", "^{", "_", "%", ".", "0.3", "\\overline{3}", "\\begin{pmatrix}", "&", "€"),
    *("\\\\", "°", "pi", "√", " to ", "3:00 ", "1 h ", "\\left(", "答案：", "~", "|", "\n"),
]
GRADERS = {
    "math": lambda text: verify_math(text, "7"),
    "components": lambda text: verify_math_components(text, "7"),
    "dapo": lambda text: verify_final_answer(text, "7"),
    "votes": normalize_answer,
    "english": lambda text: verify_english(text, "A"),
    "multilingual": lambda text: verify_multilingual(text, "A"),
    "plain": lambda text: grade_plain_number(text, "7"),
}


def seconds_of(grade, text: str) -> float:
    """Return the processor seconds of one grading; an answer that cannot be compared is fine."""
    started = time.process_time()
    try:
        grade(text)
    except ValueError as error:
        assert "can be compared" in str(error)
    return time.process_time() - started


@pytest.mark.parametrize("name", GRADERS)
def test_hostile_texts_of_100000_characters_take_a_tenth_of_a_second(name):
    verify_math("\\boxed{x+1}", "x")  # imports and caches
    for piece in HOSTILE:
        text = piece * (100_000 // len(piece))
        for response in (text, f"\\boxed{{{text}}}", f"Answer: {text}", f"<think>{text}</think><answer>7", f"7{text}x"):
            assert any(seconds_of(GRADERS[name], response) < 0.1 * slowness() for _ in range(3)), (piece, response[:20])


@pytest.mark.parametrize("answer", ["1e900000000", "-1e900000000", "10^{900000000}\\cdot 1e9", "\\boxed{" * 30_000])
def test_a_huge_number_does_not_hold_a_grader(answer):
    assert seconds_of(lambda text: verify_math(text, "7"), f"\\boxed{{{answer}}}") < 1.0


def test_boxes_are_found_with_their_braces():
    text = "\\boxed{a\\}b} {\\fbox{\\frac{1}{2}}} \\boxed{open"
    assert [box.content for box in find_boxes(text)] == ["a\\}b", "\\frac{1}{2}"]
