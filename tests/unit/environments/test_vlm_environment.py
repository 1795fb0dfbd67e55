"""Rewards of answers about images against hand-computed tables, and the environment `vlm` with its processes."""

import asyncio
from typing import Any

import pytest
import torch

from nemo_rl.config import REPOSITORY_ROOT, GRPOMasterConfig, load_config
from nemo_rl.config.schema.env import VLMEnvironmentConfig, kind_by_keys, stop_strings_of
from nemo_rl.environments.grading.pool import GradingPool
from nemo_rl.environments.grading.vlm_rewards import (
    IMAGE_REWARDS,
    BoxReward,
    ExactAlnumReward,
    FormatReward,
    Geo3kReward,
    MathExprReward,
    grade_answers,
    known_response,
    tagged,
    weighted_rewards,
)
from nemo_rl.environments.registry import check_environment, create_env, env_class_path
from nemo_rl.environments.truth_check import truth_grader
from nemo_rl.environments.vlm_environment import VLMEnvironment
from nemo_rl.utils.errors import ConfigError

CLASS = "nemo_rl.environments.vlm_environment.VLMEnvironment"


def chat(*answers: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "How many?"}, *({"role": "assistant", "content": text} for text in answers)]


def functions(*named: tuple[str, float], **kwargs: Any) -> list[dict[str, Any]]:
    return [{"name": name, "weight": weight, "kwargs": kwargs} for name, weight in named]


def made(*named: tuple[str, float], **kwargs: Any) -> Any:
    section = VLMEnvironmentConfig.build(reward_functions=functions(*named, **kwargs))
    return weighted_rewards(section.reward_functions, "env.vlm")


@pytest.fixture(scope="module")
def pool():
    pool = GradingPool("hf_math_verify", num_workers=1, timeout_s=3.0)
    yield pool
    pool.close()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer> 3 </answer>", "3"),
        ("<answer>a</answer> and <answer>b</answer>", "a</answer> and <answer>b"),
        ("<answer><answer>3</answer>", "<answer>3"),
        ("<answer>3</answer></answer>", "3</answer>"),
        ("<answer></answer>", ""),
        ("</answer><answer>3", None),
        ("</answer>3<answer>", None),
        ("<answer>3", None),
        ("3</answer>", None),
        ("<ANSWER>3</ANSWER>", None),
        ("<answer>3</ answer>", None),
        ("", None),
        ("<answer>two\nlines</answer>", "two\nlines"),
    ],
)
def test_an_answer_is_between_the_first_opening_and_the_last_closing_tag(text: str, expected: str | None) -> None:
    assert tagged(text, "answer") == expected


@pytest.mark.fast
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think><answer>3</answer>", 1.0),
        ("<answer>3</answer> <think>a</think>", 1.0),
        ("<think></think>", 0.25),
        ("<answer></answer>", 0.75),
        ("</think><think>", 0.0),
        ("<think>a<answer>3</answer>", 0.75),
        ("no tags", 0.0),
    ],
)
def test_the_reward_format(text: str, expected: float) -> None:
    score = FormatReward().score(text, "any")
    assert (score.value, score.correct, score.worth) == (expected, None, None)


@pytest.mark.fast
def test_the_reward_format_has_names_of_tags() -> None:
    reward = FormatReward(think_tag="a", answer_tag="b")
    assert reward.score("<a></a><b>1</b>", "").value == 1.0 and reward.score("<think></think>", "").value == 0.0


@pytest.mark.fast
@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("<answer>Yes!</answer>", "yes", 1.0),
        ("<answer> 1,000 </answer>", "1000", 1.0),
        ("<answer>three</answer>", "3", 0.0),
        ("<answer>10</answer>", "1.0", 1.0),
        ("yes", "yes", 0.0),
        ("<answer></answer>", "yes", 0.0),
        ("<answer>yes</answer><answer>yes</answer>", "yes", 0.0),
        ("<answer>Über</answer>", "über", 1.0),
        ("<answer>東京</answer>", "大阪", 0.0),
    ],
)
def test_the_reward_exact_alnum(text: str, truth: str, expected: float) -> None:
    score = ExactAlnumReward().score(text, truth)
    assert (score.value, score.correct) == (expected, expected == 1.0)


@pytest.mark.fast
@pytest.mark.parametrize("truth", ["", "-", "?!"])
def test_a_known_answer_without_letters_is_an_error(truth: str) -> None:
    with pytest.raises(ValueError, match="no letters or digits to compare"):
        ExactAlnumReward().score("<answer>+</answer>", truth)


# The known box has the area 10000. Columns: answer, GIoU by hand, value with giou_penalty_thres=0.5.
BOXES = [
    ("[0, 0, 100, 100]", 1.0, 1.0),
    ("0,0,100,100", 1.0, 1.0),
    (" [ 0 , 0.0 , 1e2 , 100 ] ", 1.0, 1.0),
    ("[0, 0, 50, 100]", 0.5, 0.5),  # IoU 5000/10000, hull = union
    ("[0, 0, 100, 200]", 0.5, 0.5),
    ("[50, 0, 150, 100]", 1 / 3, 1 / 3),  # 5000/15000, hull 15000
    ("[50, 50, 150, 150]", 2500 / 17500 - 5000 / 22500, 2500 / 17500 - 5000 / 22500),
    ("[100, 100, 200, 200]", -0.5, -0.5),  # union 20000, hull 40000
    ("[200, 0, 300, 100]", -1 / 3, -1 / 3),
    ("[10, 10, 110, 110]", 8100 / 11900 - 200 / 12100, 8100 / 11900),  # above 0.5: no penalty
    ("[0, 0, 0, 100]", 0.0, 0.0),  # no area, inside the hull
    ("[900, 900, 900, 900]", -1 + 10000 / 810000, -1 + 10000 / 810000),
]


@pytest.mark.fast
@pytest.mark.parametrize(("answer", "giou", "with_threshold"), BOXES)
def test_the_reward_bbox_giou(answer: str, giou: float, with_threshold: float) -> None:
    text = f"<think>0</think><answer>{answer}</answer>"
    score = BoxReward().score(text, "[0, 0, 100, 100]")
    assert score.value == pytest.approx(giou, abs=1e-12) and score.correct is (giou > 0.5)
    score = BoxReward(giou_penalty_thres=0.5).score(text, "0, 0, 100, 100")
    assert score.value == pytest.approx(with_threshold, abs=1e-12) and score.correct is (with_threshold > 0.5)


@pytest.mark.fast
@pytest.mark.parametrize(
    "answer",
    [
        *("", "a box", "[1, 2, 3]", "[1, 2, 3, 4, 5]", "[1 2 3 4]", "[[0, 0, 9, 9]]", "(0, 0, 9, 9)", "0, 0, nine, 9"),
        *("[nan, 0, 9, 9]", "[0, 0, inf, 9]", "[0, 0, 1e300, 9]", "[9, 0, 0, 9]", "[0, 9, 9, 0]", "[0, 0, 9, 9"),
        "9" * 100_000 + ",0,0,0",
    ],
)
def test_a_box_that_cannot_be_read_has_the_value_0(answer: str) -> None:
    score = BoxReward().score(f"<answer>{answer}</answer>", "[0, 0, 100, 100]")
    assert (score.value, score.correct) == (0.0, False)
    assert BoxReward().score(answer, "[0, 0, 100, 100]").value == 0.0


@pytest.mark.fast
@pytest.mark.parametrize("truth", ["", "a dog", "[0, 0, 9]", "[5, 0, 5, 9]", "[9, 0, 0, 9]"])
def test_a_known_box_that_is_no_box_is_an_error(truth: str) -> None:
    with pytest.raises(ValueError, match="is no box x1, y1, x2, y2"):
        BoxReward().score("<answer>[0, 0, 1, 1]</answer>", truth)


MATH = [
    ("<answer>\\frac12</answer>", "0.5", 1.0),
    ("<answer>2\\sqrt{3}</answer>", "\\sqrt{12}", 1.0),
    ("<answer>7</answer>", "7.0", 1.0),
    ("<answer>8</answer>", "7", 0.0),
    ("<answer>\\boxed{7}</answer>", "7", 1.0),
    ("<answer>30^\\circ</answer>", "30", 1.0),
    ("<answer>\\frac{1}{2</answer>", "2", 0.0),
    ("<answer>}7{</answer>", "7", 0.0),
    ("<answer></answer>", "7", 0.0),
    ("\\boxed{7}", "7", 0.0),
]


def test_the_reward_math_expr(pool) -> None:
    grades = grade_answers(made(("math_expr", 1)), [(text, truth) for text, truth, _ in MATH], pool)
    assert [grade.error for grade in grades] == [None] * len(MATH)
    assert [grade.verified.reward for grade in grades] == [value for _, _, value in MATH]
    assert [grade.verified.correct for grade in grades] == [value == 1.0 for _, _, value in MATH]


GEO3K = [
    ("<think>a</think> \\boxed{7}", "7", 1.0, True),
    ("\\boxed{7}", "7", 0.9, True),
    ("</think> \\boxed{8}", "7", 0.1, False),
    ("\\boxed{7}</think>", "7", 0.9, True),
    ("</think> \\boxed{8} \\boxed{\\frac{14}{2}}", "7", 1.0, True),
    ("</think> \\boxed{7} \\boxed{8}", "7", 0.1, False),
    ("</think> \\boxed{7", "7", 0.0, False),
    ("</think> \\boxed{7} \\boxed{8", "7", 1.0, True),
    ("</think> \\boxed{}", "7", 0.1, False),
    ("</think> {\\boxed{ }", "7", 0.1, False),
    ("7", "7", 0.0, False),
]


def test_the_reward_geo3k(pool) -> None:
    grades = grade_answers(made(("geo3k", 3)), [(text, truth) for text, truth, _, _ in GEO3K], pool)
    assert [grade.verified.reward for grade in grades] == pytest.approx([value for _, _, value, _ in GEO3K])
    assert [grade.verified.correct for grade in grades] == [right for _, _, _, right in GEO3K]
    half = grade_answers(made(("geo3k", 1), format_score=0.5), [("</think>\\boxed{8}", "7"), ("\\boxed{7}", "7")], pool)
    assert [grade.verified.reward for grade in half] == [0.5, 0.5]
    assert [grade.verified.correct for grade in half] == [False, True]


def test_weights_are_divided_by_their_sum(pool) -> None:
    rewards = made(("format", 1), ("exact_alnum", 3), ("math_expr", 4))
    answers = [
        ("<think>a</think><answer>7</answer>", "7"),
        ("<answer>14/2</answer>", "7"),
        ("<think>a</think>", "7"),
    ]
    grades = [grade.verified for grade in grade_answers(rewards, answers, pool)]
    assert grades[0].reward == {"format": 0.125, "exact_alnum": 0.375, "math_expr": 0.5}
    assert grades[1].reward == {"format": 0.75 * 0.125, "exact_alnum": 0.0, "math_expr": 0.5}
    assert grades[2].reward == {"format": 0.25 * 0.125, "exact_alnum": 0.0, "math_expr": 0.0}
    assert [(grade.correct, grade.extracted_answer) for grade in grades] == [(True, "7"), (True, "14/2"), (False, None)]
    (twice,) = grade_answers(made(("format", 1), ("format", 1)), answers[:1], pool)
    assert twice.verified.reward == 1.0 and twice.verified.correct is False


def test_errors_name_the_reward_and_are_no_zeros(pool) -> None:
    tower = "10^{" * 5 + "10" + "}" * 5
    rewards = made(("exact_alnum", 1), ("math_expr", 1))
    answers = [(f"<answer>{tower}</answer>", "7"), ("<answer>7</answer>", "-"), ("<answer>7</answer>", "7")]
    hangs, unreadable, right = grade_answers(rewards, answers, pool)
    assert "longer than 3 s" in hangs.error and "in the reward 'math_expr'" in hangs.error
    assert unreadable.error.endswith("no letters or digits to compare, in the reward 'exact_alnum'")
    assert right.error is None and hangs.verified is None and unreadable.verified is None


@pytest.mark.fast
@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ([], "env.mine.reward_functions is missing or empty.*Names: format, exact_alnum, math_expr, bbox_giou, geo3k"),
        ([{"name": "bleu"}], "0.name: Input should be 'format', 'exact_alnum', 'math_expr', 'bbox_giou' or 'geo3k'"),
        ([{"name": "format", "weigth": 2}], "0.weigth: Extra inputs are not permitted"),
        (functions(("format", 0), ("geo3k", 0)), "env.mine.reward_functions: the sum of the weights is 0"),
        (functions(("format", -1)), "the sum of the weights is -1. It must be above 0"),
        (functions(("format", 1), tag="x"), r"reward_functions.0.kwargs.tag is no argument of FormatReward.*think_tag"),
        (functions(("bbox_giou", 1), giou_penalty_thres="high"), "reward_functions.0.kwargs.giou_penalty_thres='high'"),
        ("format", "Input should be a valid list"),
    ],
)
def test_what_is_no_reward_is_refused(listed: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        check_environment("mine", {"reward_functions": listed})


@pytest.mark.fast
def test_names_of_the_environment() -> None:
    section = {"reward_functions": functions(("format", 1)), "stop_strings": ["</answer>"]}
    for name in ("vlm", "clevr-cogent", "geometry3k", "refcoco", "of_my_own"):
        assert env_class_path(name, section) == CLASS
        check_environment(name, section)
        assert stop_strings_of({name: section}, name) == ["</answer>"]
    with pytest.raises(ConfigError, match="env.refcoco.reward_functions is missing"):
        check_environment("refcoco", {"num_workers": 2})
    assert stop_strings_of({"vlm": VLMEnvironmentConfig.build(**section)}, "vlm") == ["</answer>"]
    assert kind_by_keys("my_file.MyClass", section) is None and kind_by_keys("math", None) is None


def test_a_configuration_names_rewards_and_overrides_change_them() -> None:
    config = load_config(
        REPOSITORY_ROOT / "examples/configs/grpo_math_cpu.yaml",
        [
            "data.default.env_name=clevr-cogent",
            "env.clevr-cogent.reward_functions=[{name: format, weight: 0.2}, {name: exact_alnum, weight: 0.8}]",
            "env.clevr-cogent.num_workers=2",
        ],
        schema=GRPOMasterConfig,
    )
    section = config.env["clevr-cogent"]
    assert section["num_workers"] == 2 and section["reward_functions"][1]["name"] == "exact_alnum"
    config = load_config(
        REPOSITORY_ROOT / "examples/configs/grpo_math_cpu.yaml",
        ["+env.vlm={reward_functions: [{name: geo3k}]}", "data.default.env_name=vlm"],
        schema=GRPOMasterConfig,
    )
    assert config.env["vlm"].reward_functions[0].weight == 1.0
    with pytest.raises(ConfigError, match="bleu"):
        load_config(
            REPOSITORY_ROOT / "examples/configs/grpo_math_cpu.yaml",
            ["+env.vlm={reward_functions: [{name: bleu}]}"],
            schema=GRPOMasterConfig,
        )


TWO = {"num_workers": 1, "reward_functions": functions(("format", 0.2), ("exact_alnum", 0.8))}


def test_a_step_grades_ends_the_episode_and_observes() -> None:
    environment = VLMEnvironment(TWO)
    logs = [chat("<think>a</think>", "<answer>Red</answer>"), chat("<answer>blue</answer>"), chat("red"), chat("x")]
    truths: Any = [{"ground_truth": "red"}] * 3 + [{"ground_truth": "?"}]
    try:
        outcome = environment.step(logs, truths, return_extracted_answer=True)
    finally:
        environment.shutdown()
    assert outcome.rewards["format"].tolist() == pytest.approx([0.2, 0.15, 0.0, 0.0])
    assert outcome.rewards["exact_alnum"].tolist() == [0.8, 0.0, 0.0, 0.0]
    words = ["correct", "incorrect", "incorrect", "not graded"]
    assert [item["content"] for item in outcome.observations] == [f"Environment: {word}" for word in words]
    assert [item.get("correct") for item in outcome.metadata] == [True, False, False, None]
    assert outcome.answers == ["Red", "blue", None, None]
    assert outcome.errors[:3] == [None] * 3 and "in the reward 'exact_alnum'" in outcome.errors[3]
    assert outcome.terminateds.tolist() == [True] * 4


def test_a_format_alone_is_never_correct() -> None:
    environment = VLMEnvironment({"reward_functions": functions(("format", 1))})
    outcome = environment.step([chat("<think></think><answer></answer>")], [{"ground_truth": ""}])
    environment.shutdown()
    assert outcome.rewards.tolist() == [1.0] and outcome.observations[0]["content"] == "Environment: incorrect"


def test_metrics_count_correct_answers_whatever_their_reward_is() -> None:
    environment = VLMEnvironment({"reward_functions": functions(("bbox_giou", 1))})
    batch: Any = {
        "rewards": torch.tensor([0.6, -0.3, 0.9, 0.1]),
        "extra_env_info": [{"correct": value} for value in (True, False, True, False)],
        "is_end": torch.tensor([1, 1, 1, 0]),
        "generation_lengths": torch.tensor([10, 20, 30, 40]),
        "prompt_lengths": torch.tensor([5, 5, 6, 6]),
        "text": ["a", "a", "b", "c"],
    }
    after, metrics = environment.global_post_process_and_metrics(batch)
    environment.shutdown()
    assert after["rewards"].tolist() == pytest.approx([0.6, -0.3, 0.9, 0.1])
    assert metrics["accuracy"] == 0.5 and metrics["pass@samples_per_prompt"] == pytest.approx(2 / 3)
    assert metrics["correct_solution_generation_lengths"] == 20.0 and metrics["num_problems_in_batch"] == 4


@pytest.mark.fast
@pytest.mark.parametrize("name", IMAGE_REWARDS)
def test_known_answers_get_their_reward(name: str) -> None:
    truths = {"bbox_giou": "[1, 2, 30, 40]"}
    rewards = made((name, 1))
    response = known_response(rewards, truths.get(name, "7"))
    score = rewards[0].reward.score(response, truths.get(name, "7"))
    assert score.value + (score.worth or 0.0) == pytest.approx(1.0)


def test_known_answers_are_graded_as_their_own_answers() -> None:
    grader = truth_grader("clevr-cogent", TWO)
    assert grader is not None and grader.grade(["yes", "3"]) == {}
    assert "no letters or digits" in grader.grade(["yes", "-"])["-"]
    assert truth_grader("vlm", {"reward_functions": functions(("format", 1))}) is None
    every = truth_grader("vlm", {"reward_functions": functions(("format", 1), ("math_expr", 1), ("geo3k", 1))})
    assert every is not None and every.grade(["\\frac{1}{2}", "7", "\\boxed{3}"]) == {}
    assert every.grade(["#### 7"]) and isinstance(MathExprReward(), IMAGE_REWARDS["math_expr"])
    assert Geo3kReward().written("\\boxed{3}") == ("</think>", "\\boxed{3}")


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_answers_are_graded_in_the_processes_of_its_actor() -> None:
    tower = "10^{" * 5 + "10" + "}" * 5
    answers = {"\\frac12": 1.0, "3": 0.1, tower: None}
    section = {
        "num_workers": 2,
        "timeout_s": 3.0,
        "reward_functions": functions(("format", 0.1)) + functions(("math_expr", 0.9)),
    }
    client = create_env("geometry3k", section)

    async def graded() -> Any:
        said = [chat(f"<think>a</think><answer>{answer}</answer>") for answer in answers]
        return await asyncio.gather(*(client.step(log, {"ground_truth": "0.5"}) for log in said))

    try:
        results = asyncio.run(graded())
    finally:
        client.shutdown()
    totals = [None if result.reward is None else sum(result.reward.values()) for result in results]
    assert totals == [pytest.approx(value) if value is not None else None for value in answers.values()]
    assert "longer than 3 s" in results[2].error and "in the reward 'math_expr'" in results[2].error
    assert results[0].metadata["correct"] is True and results[1].metadata["correct"] is False
