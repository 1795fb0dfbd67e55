"""Every built-in data set of evaluations, from small files with the columns of the real ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from eval_helpers import eval_config, make_prompts

from nemo_rl.config.base.names import ARITHMETIC
from nemo_rl.config.rules.evaluation import EVAL_DATASET_NAMES
from nemo_rl.evals.prompts import EVAL_REGISTRY, EvalPrompts
from nemo_rl.utils.errors import DataError

SHARED = Path(__file__).resolve().parents[3] / "../shared/data"
CHOICE = "env.math.verifier_type=english_multichoice"
LONG = ("data.max_input_seq_length=null",)

ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "aime2024": ({"problem": "P", "answer": "073", "solution": "S"}, "073"),
    "aime2025": ({"question": "P", "answer": 70}, "70"),
    "gsm8k": ({"question": "P", "answer": "1+1=2\n#### 1,002"}, "1002"),
    "math": ({"problem": "P", "solution": "so \\boxed{\\frac{1}{2}}.", "type": "Algebra"}, "\\frac{1}{2}"),
    "math500": ({"problem": "P", "answer": "p - q", "solution": "\\boxed{x}", "subject": "Algebra"}, "p - q"),
    "mmlu": ({"question": "P", "choices": ["w", "x", "y", "z"], "answer": 2, "subject": "law"}, "C"),
    "mmlu_pro": ({"question": "P", "options": ["x"] * 9, "answer": "I", "category": "law"}, "I"),
    "mmlu_DE-DE": ({"Question": "P", "A": "w", "B": "x", "C": "y", "D": "z", "Answer": "D", "Subject": "law"}, "D"),
}


def _prompts(tmp_path: Path, name: str, rows: list[Any], *overrides: str) -> EvalPrompts:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    if "mmlu_DE" in name:
        overrides += ("env.math.verifier_type=multilingual_multichoice",)
    elif name.startswith(("mmlu", "gpqa")):
        overrides += (CHOICE,)
    return make_prompts(
        eval_config(f"data.dataset_name={name}", f"data.data_path={file}", "data.num_samples=null", *LONG, *overrides)
    )


@pytest.mark.parametrize("name", ROWS)
def test_each_data_set_gives_problem_and_answer(tmp_path, name) -> None:
    row, answer = ROWS[name]
    prompts = _prompts(tmp_path, name, [row])
    batch = prompts.batch(0, 1)
    assert batch["extra_env_info"][0]["ground_truth"] == answer
    assert "P" in batch["message_log"][0][0]["content"]
    assert prompts.topic(0) == {"math": "Algebra", "math500": "Algebra"}.get(
        name, "law" if name.startswith("mmlu") else None
    )


def test_options_are_lettered(tmp_path) -> None:
    text = _prompts(tmp_path, "mmlu_DE-DE", [ROWS["mmlu_DE-DE"][0]]).batch(0, 1)["message_log"][0][0]["content"]
    assert "A) w\nB) x\nC) y\nD) z" in text


def test_gpqa_options_are_shuffled_by_the_seed(tmp_path) -> None:
    rows = [
        {
            "Question": f"Q{number}",
            "Correct Answer": "right",
            **{f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)},
            "High-level domain": "Physics",
        }
        for number in range(40)
    ]

    def letters(seed: int) -> str:
        prompts = _prompts(tmp_path, "gpqa_diamond", rows, f"data.seed={seed}")
        assert prompts.topic(0) == "Physics"
        found = ""
        for log, info in zip(*[prompts.batch(0, 40)[key] for key in ("message_log", "extra_env_info")], strict=True):
            letter = info["ground_truth"]
            assert f"{letter}) right" in log[0]["content"]
            found += letter
        return found

    assert letters(1) == letters(1) != letters(2)
    assert set(letters(1)) == set("ABCD")


def test_bad_rows_are_reported_and_too_many_refused(tmp_path, caplog) -> None:
    good = ROWS["mmlu"][0]
    rows = [good] * 20 + [{**good, "answer": "F"}, "{broken"]
    prompts = _prompts(tmp_path, "mmlu", rows)
    assert (len(prompts), prompts.num_bad_rows) == (20, 2)
    assert "rows.jsonl:21" in caplog.text
    assert "rows.jsonl:22" in caplog.text
    with pytest.raises(DataError, match=r"data\.max_bad_row_share"):
        _prompts(tmp_path, "mmlu", [good, {**good, "choices": []}])
    with pytest.raises(DataError, match="no usable row"):
        _prompts(tmp_path, "math", [{"problem": "P", "solution": "no box"}])


@pytest.mark.parametrize("name", ["problems.csv", "problems.json", "problems.jsonl"])
def test_a_local_file_by_its_path(tmp_path, name) -> None:
    rows = [{"q": "six times seven", "a": 42}, {"q": "a half", "a": "1/2"}]
    texts = {
        "problems.csv": "q,a\nsix times seven,42\na half,1/2\n",
        "problems.json": json.dumps(rows),
        "problems.jsonl": "\n".join(map(json.dumps, rows)),
    }
    (tmp_path / name).write_text(texts[name])
    kind = name.rpartition(".")[2]
    config = eval_config(
        f"data.dataset_name={tmp_path / name}", "data.problem_key=q", "data.solution_key=a", f"data.file_format={kind}"
    )
    batch = make_prompts(config).batch(0, 2)
    assert [info["ground_truth"] for info in batch["extra_env_info"]] == ["42", "1/2"]


def test_max_samples_is_a_seeded_draw_in_file_order(tmp_path) -> None:
    rows = [{"problem": f"P{number:03}", "answer": str(number)} for number in range(100)]

    def chosen(seed: int) -> list[int]:
        prompts = _prompts(tmp_path, "math500", rows, "data.max_samples=10", f"data.seed={seed}")
        return [int(info["ground_truth"]) for info in prompts.batch(0, len(prompts))["extra_env_info"]]

    assert len(chosen(1)) == 10
    assert chosen(1) == sorted(chosen(1)) == chosen(1)
    assert chosen(1) != chosen(2)


def test_repeated_problems_come_in_whole_rounds(tmp_path) -> None:
    rows = [{"problem": f"P{number}", "answer": str(number), "subject": f"S{number}"} for number in range(3)]
    prompts = _prompts(tmp_path, "math500", rows, "data.repeat=2", "data.max_samples=2")
    batch = prompts.batch(0, len(prompts))
    truths = [info["ground_truth"] for info in batch["extra_env_info"]]
    assert len(truths) == 4 and truths[:2] == truths[2:] and len(set(truths)) == 2
    assert [prompts.topic(index) for index in range(4)] == [f"S{truth}" for truth in truths]


def test_the_prompt_file_surrounds_the_problem(tmp_path) -> None:
    prompts = _prompts(tmp_path, "math500", [ROWS["math500"][0]], "data.prompt_file=examples/prompts/math.txt")
    assert "inside \\boxed{}.\n\nP\n" in prompts.batch(0, 1)["message_log"][0][0]["content"]


def test_without_network_the_error_advises_a_local_copy(monkeypatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"set data\.data_path to a local copy"):
        make_prompts(eval_config("data.dataset_name=gsm8k", "data.data_path=absent/nothing"))


def test_all_names_are_registered() -> None:
    assert set(EVAL_REGISTRY) | {ARITHMETIC} == set(EVAL_DATASET_NAMES)


def test_data_sets_without_problems_have_processors_of_their_own(tmp_path: Path) -> None:
    common = ("data.max_input_seq_length=null", "~data.min_operand", "~data.max_operand", "~env.math")
    game = ("data.env_name=sliding_puzzle_game", "+env.sliding_puzzle_game={}")
    episodes = make_prompts(eval_config("data.dataset_name=episodes", "data.num_samples=3", *common, *game))
    assert len(episodes) == 3
    batch = episodes.batch(0, 3)
    assert len({info["seed"] for info in batch["extra_env_info"]}) == 3
    row = {"agent_ref": {"name": "a"}, "responses_create_params": {"input": "What is 2 * 2?"}, "expected_answer": "4"}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    servers = ("data.env_name=nemo_gym", "+env.nemo_gym={config_paths: [a.yaml]}", "~data.num_samples")
    given = ("data.dataset_name=NemoGymDataset", f"data.data_path={file}", *common, *servers)
    for processor in ((), ("data.processor=nemo_gym_data_processor",)):
        batch = make_prompts(eval_config(*given, *processor)).batch(0, 1)
        assert batch["extra_env_info"][0]["gym_row"] == row
        assert "2 * 2" in batch["message_log"][0][0]["content"]
    with pytest.raises(DataError, match="processor: math_hf_data_processor cannot read"):
        make_prompts(eval_config(*given, "data.processor=math_hf_data_processor"))
