"""Known answers are graded as their own answers before a run starts."""

import json
import logging
from pathlib import Path

import pytest

from nemo_rl.algorithms import distillation, grpo, ppo
from nemo_rl.algorithms.rollout.environments import response_data
from nemo_rl.algorithms.setup.row_check import check_known_answers
from nemo_rl.config import (
    REPOSITORY_ROOT,
    DistillationMasterConfig,
    EvalMasterConfig,
    GRPOMasterConfig,
    PPOMasterConfig,
    load_config,
)
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.environments.math_environment import MathEnvironment
from nemo_rl.environments.registry import ENV_REGISTRY
from nemo_rl.environments.truth_check import TruthGrader, sampled_indices, truth_grader
from nemo_rl.evals import evaluator
from nemo_rl.launch.checks import Request, check_data
from nemo_rl.utils.errors import ConfigError, DataError

CONFIGS = REPOSITORY_ROOT / "examples/configs"
SHARED = REPOSITORY_ROOT / "../shared/data"
COLUMNS = ["data.train.dataset_name=ResponseDataset", "data.train.input_key=question", "data.train.output_key=answer"]
ALGORITHMS = {
    "grpo": (grpo.recipe, GRPOMasterConfig, "grpo_math_cpu.yaml"),
    "ppo": (ppo.recipe, PPOMasterConfig, "ppo_math_cpu.yaml"),
    "distillation": (distillation.recipe, DistillationMasterConfig, "distillation_math_cpu.yaml"),
}


class Own(MathEnvironment):
    """A user's environment."""


def rows_file(folder: Path, answers: list[str]) -> str:
    """Write rows in the columns of GSM8K and return the path."""
    path = folder / "rows.jsonl"
    lines = [json.dumps({"question": f"Question {idx}?", "answer": text}) for idx, text in enumerate(answers)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def solutions(count: int) -> list[str]:
    return [f"He has {n} apples and buys one, {n}+1=<<{n}+1={n + 1}>>{n + 1}.\n#### {n + 1}" for n in range(count)]


def build(name: str, overrides: list[str]):
    """Build the recipe of a run; start nothing."""
    recipe, schema, file = ALGORITHMS[name]
    return recipe(load_config(CONFIGS / file, [*COLUMNS, *overrides], schema=schema))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_solutions_in_the_form_of_gsm8k_are_refused_with_the_remedy(name, tmp_path):
    path = rows_file(tmp_path, solutions(5))
    with pytest.raises(DataError) as refused:
        build(name, [f"data.train.data_path={path}"])
    message = str(refused.value)
    assert "0 of 5 known answers are right" in message and "'math' (verifier hf_math_verify)" in message
    assert "rows.jsonl:1: 'He has 0 apples" in message and "rows.jsonl:3: " in message
    assert "rows.jsonl:4" not in message, "three examples"
    assert "a whole solution with '####'" in message and "dataset_name: gsm8k" in message


def test_the_raw_file_of_gsm8k_is_refused_and_its_reader_accepted(caplog):
    path = SHARED / "gsm8k/train.jsonl.gz"
    if not path.exists():
        pytest.skip("needs the shared data")
    with pytest.raises(DataError, match="0 of 128 known answers .*(?s:.)*dataset_name: gsm8k"):
        build("grpo", [f"data.train.data_path={path}"])
    build("grpo", ["data.train.dataset_name=gsm8k", f"data.train.data_path={path}"])
    assert "known answers" not in caplog.text


@pytest.mark.parametrize("file", ["math/math_train_answers.json.gz", "aime/aime_1983_2023.json.gz"])
def test_real_answers_pass_silently(file, caplog):
    path = SHARED / file
    if not path.exists():
        pytest.skip("needs the shared data")
    build("grpo", [f"data.train.data_path={path}", "data.train.input_key=problem"])
    assert "known answers" not in caplog.text


@pytest.mark.parametrize(
    "answers",
    [["18", "\\frac{1}{2}", "x=5", "12:00", "BCA", "42 cm", "(1,2)"], ["1,234"] * 3, ["Evelyn", "no solution"]],
)
@pytest.mark.parametrize("verifier", ["hf_math_verify", "dapo_math_verify"])
def test_right_answers_pass_silently(answers, verifier, tmp_path, caplog):
    build("grpo", [f"data.train.data_path={rows_file(tmp_path, answers)}", f"env.math.math_verify_impl={verifier}"])
    assert "known answers" not in caplog.text


def test_half_of_the_answers_bad_is_a_warning_with_three_examples(tmp_path, caplog):
    path = rows_file(tmp_path, [*solutions(5), "1", "2", "\\frac{1}{2}", "x", "5"])
    with caplog.at_level(logging.WARNING):
        build("grpo", [f"data.train.data_path={path}"])
    (message,) = [record.message for record in caplog.records if "known answers" in record.message]
    assert "5 of 10 known answers are right" in message and message.count("rows.jsonl:") == 4
    assert "dataset_name: gsm8k" in message


def test_one_bad_answer_of_ten_is_no_warning(tmp_path, caplog):
    build("grpo", [f"data.train.data_path={rows_file(tmp_path, [*map(str, range(9)), *solutions(1)])}"])
    assert "known answers" not in caplog.text


def test_validation_rows_are_graded_too(tmp_path):
    path = rows_file(tmp_path, solutions(3))
    with pytest.raises(DataError, match="0 of 3 known answers"):
        recipe, schema, file = ALGORITHMS["grpo"]
        columns = [text.replace("data.train", "data.validation") for text in COLUMNS]
        recipe(load_config(CONFIGS / file, [*columns, f"data.validation.data_path={path}"], schema=schema))


def test_letters_are_wanted_for_multiple_choice(tmp_path):
    overrides = ["env.math.verifier_type=english_multichoice", "data.validation=null"]
    overrides += ["grpo.val_period=0", "grpo.val_at_start=false"]
    build("grpo", [*overrides, f"data.train.data_path={rows_file(tmp_path, ['A', 'B', 'C'])}"])
    with pytest.raises(DataError, match="compares letters"):
        build("grpo", [*overrides, f"data.train.data_path={rows_file(tmp_path, ['Paris', 'Rome'])}"])


def test_environments_of_users_are_not_graded(tmp_path, monkeypatch):
    monkeypatch.setitem(ENV_REGISTRY, "own_math", {"actor_class_fqn": f"{Own.__module__}.{Own.__qualname__}"})
    assert truth_grader("own_math", {}) is None and truth_grader("sliding_puzzle_game", {}) is None
    assert truth_grader("math", {}) == TruthGrader("math", "hf_math_verify", 10.0)
    assert truth_grader("math_multi_reward", {"timeout_s": 2}) == TruthGrader(
        "math_multi_reward", "math_multi_reward", 2.0
    )
    overrides = [*COLUMNS, f"data.train.data_path={rows_file(tmp_path, solutions(3))}"]
    config = load_config(CONFIGS / "grpo_math_cpu.yaml", overrides)
    data = response_data(get_tokenizer(config.policy.tokenizer), config)
    check_known_answers(config, data, own={"math"})
    with pytest.raises(DataError):
        check_known_answers(config, data)


def test_an_evaluation_is_refused_before_it_starts(tmp_path):
    path = rows_file(tmp_path, solutions(3))
    overrides = [
        f"data.dataset_name={path}",
        "data.problem_key=question",
        "data.solution_key=answer",
        f"generation.model_name={REPOSITORY_ROOT / 'examples/assets/tiny-chat'}",
        "cluster.device=cpu",
    ]
    config = load_config(CONFIGS / "evals/eval.yaml", overrides, schema=EvalMasterConfig)
    generation, prompts, checked = evaluator.setup(config)
    with pytest.raises(DataError, match="0 of 3 known answers"):
        evaluator.run_env_eval(generation, prompts, None, checked)
    with pytest.raises(DataError, match="0 of 3 known answers"):
        check_data(Request(config))


def test_doctor_looks_at_the_known_answers(tmp_path):
    config = load_config(
        CONFIGS / "grpo_math_cpu.yaml", [*COLUMNS, f"data.train.data_path={rows_file(tmp_path, solutions(3))}"]
    )
    with pytest.raises(DataError, match="0 of 3 known answers"):
        check_data(Request(config))


def test_first_rows_and_a_spread_of_the_rest_are_graded():
    assert sampled_indices(0) == [] and sampled_indices(3) == [0, 1, 2]
    assert sampled_indices(128) == list(range(128))
    many = sampled_indices(64 + 6400)
    assert many[:64] == list(range(64)) and many[64:67] == [114, 214, 314] and many[-1] == 64 + 6350


def test_plain_numbers_need_no_process(monkeypatch):
    monkeypatch.setattr("nemo_rl.environments.grading.pool.GradingProcess", None)
    assert TruthGrader("math", "hf_math_verify", 1.0).grade(["18", "-7", "2.5", "18"]) == {}


def test_an_unreadable_answer_names_its_reason():
    reasons = TruthGrader("math", "hf_math_verify", 5.0).grade(["", "}", "5"])
    assert "no expression in the ground truth" in reasons[""]
    assert "5" not in reasons and reasons["}"]


def test_fields_that_rows_do_not_have_are_refused_before_a_start(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY_ROOT / "examples")
    path = REPOSITORY_ROOT / "examples/configs/grpo_agent_cpu.yaml"
    with pytest.raises(ConfigError, match=r"env\.agent\.row_fields names nosuch, which .* It has: ground_truth"):
        check_data(Request(load_config(path, ["env.agent.row_fields=[nosuch,ground_truth]"])))
    check_data(Request(load_config(path, ["env.agent.row_fields=[ground_truth]"])))
