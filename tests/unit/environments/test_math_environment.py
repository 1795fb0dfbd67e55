import pytest
import torch

from nemo_rl.environments.math_environment import MathEnvironment, MathMultiRewardEnvironment
from nemo_rl.utils.errors import ConfigError


def answer(text):
    return [
        {"role": "user", "content": "What is it? \\boxed{9}"},
        {"role": "assistant", "content": text},
    ]


def truths(*values):
    return [{"ground_truth": value} for value in values]


@pytest.fixture(scope="module")
def math():
    environment = MathEnvironment({"num_workers": 2, "timeout_s": 3.0})
    yield environment
    environment.shutdown()


def test_a_step_grades_ends_the_episode_and_observes(math):
    logs = [answer("\\boxed{9}"), answer("\\boxed{\\frac12}"), answer("\\boxed{3}"), answer("dunno")]
    outcome = math.step(logs, truths("9", "0.5", "4", "9"), return_extracted_answer=True)
    assert outcome.rewards.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert outcome.terminateds.tolist() == [True] * 4
    assert [item["content"] for item in outcome.observations] == [
        "Environment: correct",
        "Environment: correct",
        "Environment: incorrect",
        "Environment: incorrect",
    ]
    assert {item["role"] for item in outcome.observations} == {"environment"}
    assert outcome.answers == ["9", "\\frac{1}{2}", "3", None]
    assert [item["extracted_answer"] for item in outcome.metadata] == outcome.answers
    assert outcome.errors == [None] * 4 and outcome.next_stop_strings == [None] * 4
    assert math.step(logs[:1], truths("9")).answers is None


def test_an_answer_that_hangs_sympy_is_an_error_not_a_zero(math):
    tower = "\\boxed{" + "10^{" * 5 + "10" + "}" * 5 + "}"
    outcome = math.step([answer(tower), answer("\\boxed{x}")], truths("7", "x"))
    assert "longer than 3 s" in outcome.errors[0] and outcome.errors[1] is None
    assert outcome.observations[0]["content"] == "Environment: not graded"
    assert outcome.rewards[1] == 1.0


def test_a_truth_that_cannot_be_read_is_an_error(math):
    outcome = math.step([answer("\\boxed{7}")], truths(""))
    assert "ground truth" in outcome.errors[0]


def test_the_multi_reward_environment_returns_components():
    environment = MathMultiRewardEnvironment({"num_workers": 1, "timeout_s": 3.0})
    try:
        logs = [answer("<think>.</think><answer>\\boxed{7}</answer>"), answer("\\boxed{1.5}")]
        outcome = environment.step(logs, truths("7", "7"))
    finally:
        environment.shutdown()
    assert {name: column.tolist() for name, column in outcome.rewards.items()} == {
        "reward/correctness": [1.0, 0.0],
        "reward/integer": [1.0, 0.0],
        "reward/format": [1.0, 0.0],
    }
    assert outcome.observations[0]["content"] == "Environment: correct"


@pytest.mark.parametrize(
    ("cfg", "text", "truth"),
    [
        ({"math_verify_impl": "dapo_math_verify"}, "Answer: 3", "3"),
        ({"verifier_type": "english_multichoice"}, "Answer: B", "B"),
        ({"verifier_type": "multilingual_multichoice"}, "答案：B", "B"),
    ],
)
def test_the_configuration_picks_the_verifier(cfg, text, truth):
    environment = MathEnvironment({"num_workers": 1, **cfg})
    try:
        outcome = environment.step([answer(text), answer("no")], truths(truth, truth))
    finally:
        environment.shutdown()
    assert outcome.rewards.tolist() == [1.0, 0.0] and outcome.errors == [None, None]


def test_wrong_keys_are_refused():
    with pytest.raises(ConfigError, match="num_wrokers"):
        MathEnvironment({"num_wrokers": 2})


def test_metrics_of_six_rollouts_equal_hand_computed_values(math):
    batch = {
        "rewards": torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0]),
        "is_end": torch.tensor([1, 1, 0, 1, 1, 1]),
        "generation_lengths": torch.tensor([10, 20, 30, 40, 50, 60]),
        "prompt_lengths": torch.tensor([5, 5, 5, 6, 6, 7]),
        "text": torch.tensor([[1, 1], [1, 1], [1, 1], [2, 2], [2, 2], [3, 3]]),
    }
    after, metrics = math.global_post_process_and_metrics(batch)
    assert after["rewards"].tolist() == [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert metrics == pytest.approx(
        {
            "accuracy": 3 / 6,
            "pass@samples_per_prompt": 2 / 3,
            "fraction_of_samples_properly_ended": 5 / 6,
            "num_problems_in_batch": 6,
            "generation_lengths": 35.0,
            "prompt_lengths": 34 / 6,
            "correct_solution_generation_lengths": 80 / 3,
        }
    )


def test_the_format_reward_reads_the_end_of_the_prompt():
    environment = MathMultiRewardEnvironment({"num_workers": 1, "timeout_s": 3.0})
    prompts = ["What is it?<|assistant|><think>\n", "What is it?<|assistant|>"]
    parts = [{"type": "text", "text": prompts[0]}, {"type": "image", "image": None}]
    closed = {"role": "assistant", "content": ".</think><answer>\\boxed{7}</answer>"}
    try:
        logs = [[{"role": "user", "content": prompt}, closed] for prompt in (*prompts, parts)]
        rewards = environment.step([*logs, [closed]], truths("7", "7", "7", "7")).rewards
        assert rewards["reward/format"].tolist() == [1.0, 0.0, 1.0, 0.0]
        assert rewards["reward/correctness"].tolist() == [1.0] * 4
    finally:
        environment.shutdown()


def test_times_and_words_are_graded_as_texts(math):
    logs = [answer("\\boxed{1:00}"), answer("\\boxed{12:00}"), answer("\\boxed{ABC}"), answer("\\boxed{42 m}")]
    outcome = math.step(logs, truths("12:00", "12:00", "BCA", "42\\text{ cm}"))
    assert outcome.rewards.tolist() == [0.0, 1.0, 0.0, 0.0] and outcome.errors == [None] * 4
