import random
from fractions import Fraction

import pytest
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from nemo_rl.environments.grading.dapo import normalize_answer, verify_final_answer
from nemo_rl.environments.grading.final_answer import grade_plain_number, last_boxed
from nemo_rl.environments.grading.grade import load_verifier
from nemo_rl.environments.grading.hf_math_verify import verify_math, verify_math_components
from nemo_rl.environments.grading.multichoice import verify_english, verify_multilingual

NUMBERS = [
    "18",
    "3",
    "70000",
    "540",
    "20",
    "64",
    "260",
    "160",
    "45",
    "366",
    "694",
    "13",
    "5",
    "1,430",
    "2.5",
    "-7",
    "12.75",
]


def reference(response: str, truth: str) -> float:
    """Grade with math-verify as its documentation uses it, in this process, with its own deadlines."""
    gold = parse(f"\\boxed{{{truth}}}", [LatexExtractionConfig()])
    answer = parse(response, [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()])
    return float(verify(gold, answer))


@pytest.mark.parametrize("form", ["\\boxed{{{}}}", "The answer is ${}$.", "It is {} dollars", "{}.00"])
def test_numbers_get_the_same_rewards_as_from_math_verify(form):
    for number, truth in enumerate(NUMBERS):
        answer = truth if number % 2 else NUMBERS[number - 1]
        response = "Step by step, 3 + 4 = 7. " + form.format(answer)
        expected = 1.0 if number % 2 else float(Fraction(answer.replace(",", "")) == Fraction(truth.replace(",", "")))
        assert verify_math(response, truth).reward == expected
        assert expected == reference(response, truth) or truth == "-7", "math-verify does not read -7.00"


TEMPLATES = [
    "\\boxed{%s}",
    "so $x = \\boxed{%s}$ is it",
    "\\[ 2 + 2 = \\boxed{%s}. \\] Done {really}.",
    "$4$ and then \\boxed{ %s } apples",
    "The final answer is 12. \\boxed{%s}%% of",
    "\\(\\boxed{%s}\\)\n\nAnswer: 7",
    "first $\\frac{1}{2}$\n$$\\boxed{%s}$$ and $9$",
]


def test_plain_numbers_are_graded_as_math_verify_grades_them():
    draw = random.Random(7)

    def number() -> str:
        digits = draw.choice([1, 2, 3, 9, 15])
        text = str(draw.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits))
        if draw.random() < 0.4:
            text += "." + "".join(draw.choices("0159", k=draw.choice([1, 2, 6])))
        return draw.choice(["", "-"]) + text

    decided = 0
    for _ in range(400):
        truth = number()
        near = [truth, truth + ".0", truth.removeprefix("-"), truth[:-1] + draw.choice("0123456789")]
        for answer in [*near, number()]:
            response = draw.choice(TEMPLATES) % answer
            verified = grade_plain_number(response, truth)
            if verified is not None:
                decided += 1
                assert verified.reward == verify_math(response, truth).reward, (response, truth)
    assert decided > 1000


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("\\boxed{1} or \\boxed{2}", "2"),
        ("\\boxed{3}. The final answer is 5. I hope it is correct.", "5"),
        ("\\boxed{50\\%}", "50"),
        ("\\boxed{1,234}", "1234"),
        ("18", "18"),
        ("\\boxed{x=3}", "3"),
        ("\\boxed{0.3333333}", "0.3333333"),
        ("\\boxed{1/2}", "0.5"),
        ("\\boxed{3}", "\\frac{6}{2}"),
        ("\\boxed{3", "3"),
    ],
)
def test_everything_else_is_left_to_math_verify(response, truth):
    assert grade_plain_number(response, truth) is None


def test_math_verify_compares_meaning_not_spelling():
    assert verify_math("$\\boxed{\\frac{2}{4}}$", "0.5").reward == 1.0
    assert verify_math("$\\boxed{(x+1)^2}$", "x^2 + 2x + 1").reward == 1.0
    assert verify_math("no number at all", "1").reward == 0.0
    assert verify_math("Answer: 3. \\boxed{4}", "3").reward == 0.0  # the box counts first
    with pytest.raises(ValueError, match="ground truth"):
        verify_math("\\boxed{1}", "")


@pytest.mark.parametrize(
    ("response", "rewards"),
    [
        ("<think>a</think>\n<answer>\\boxed{7}</answer>", (1.0, 1.0, 1.0)),
        ("<think>a</think><answer>$\\boxed{\\frac{14}{2}}$</answer>", (1.0, 0.0, 1.0)),
        ("\\boxed{8}", (0.0, 1.0, 0.0)),
        ("<think>a</think><think>b</think><answer>7</answer>", (1.0, 1.0, 0.0)),
    ],
)
def test_reward_components_are_graded_separately(response, rewards):
    names = ("reward/correctness", "reward/integer", "reward/format")
    assert verify_math_components(response, "7").reward == dict(zip(names, rewards, strict=True))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{a} \\boxed{\\frac{1}{2}} z", "\\frac{1}{2}"),
        ("\\boxed {\\{1\\}}", "\\{1\\}"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("none", None),
    ],
)
def test_the_last_boxed_answer_counts(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        ("Answer: 34", "34", 1.0),
        ("Answer: 1\nlater\nanswer : $34.$", "34", 1.0),
        ("\\boxed{3} no, Answer: 4", "4", 1.0),
        ("**Answer:** 4", "4", 1.0),
        ("Answer: 3, or rather \\boxed{4}", "4", 1.0),
        ("**Answer:** \\boxed{\\dfrac12}", "\\frac{1}{2}", 1.0),
        ("\\boxed{1,234.00}", "1234", 1.0),
        ("\\boxed{x = 5\\text{ cm}}", "5", 1.0),
        ("\\boxed{0.5}", "\\frac{1}{2}", 0.0),  # text, not algebra
        ("34", "34", 0.0),
    ],
)
def test_the_dapo_verifier_grades_the_final_answer(response, truth, reward):
    assert verify_final_answer(response, truth).reward == reward


@pytest.mark.parametrize(
    ("answer", "normal"),
    [("\\$1,234.00\\text{ dollars}.", "1234"), ("(1,2)", "(1,2)"), ("\\sqrt3", "\\sqrt{3}")],
)
def test_dapo_answers_are_normalized(answer, normal):
    assert normalize_answer(answer) == normal


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("Answer: B", "B"),
        ("Answer: A\nno\n**Answer:** (c).", "C"),
        ("answer: \\boxed{D}", "D"),
        ("Answer: because", None),
        ("B", None),
    ],
)
def test_english_multiple_choice_answers_are_extracted(response, letter):
    verified = verify_english(response, letter or "B")
    assert (verified.reward, verified.extracted_answer) == (float(letter is not None), letter)


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("Answer: B", "B"),
        ("答案：Ｃ", "C"),
        ("정답: D", "D"),
        ("الإجابة: ب", "B"),
        ("উত্তরঃ গ", "C"),
        ("उत्तर: A", "A"),
        ("Respuesta: (B)", "B"),
        ("Jibu: D", "D"),
        ("Kwa nini", None),
    ],
)
def test_multilingual_multiple_choice_answers_are_extracted(response, letter):
    verified = verify_multilingual(response, letter or "B")
    assert (verified.reward, verified.extracted_answer) == (float(letter is not None), letter)


def test_an_unknown_verifier_is_refused_with_the_list():
    with pytest.raises(ValueError, match="dapo_math_verify"):
        load_verifier("hf_mathverify")
