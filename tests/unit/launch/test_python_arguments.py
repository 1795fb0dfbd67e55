"""The arguments of `nemo_rl.grpo` and its like become a configuration, and wrong ones leave no folder."""

import json
import logging
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

import nemo_rl
from nemo_rl.config import load_config
from nemo_rl.launch import python_runs
from nemo_rl.launch.finished_run import RunMetrics
from nemo_rl.launch.given_rewards import GivenRewards
from nemo_rl.launch.given_rows import data_keys
from nemo_rl.launch.programs import PROGRAMS
from nemo_rl.utils.errors import ConfigError, DataError

pytestmark = pytest.mark.fast

ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(12)]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Return the configurations that runs would start with, in an empty folder."""
    configs: list[Any] = []

    def no_train(program: Any, config: Any, **parts: Any) -> None:
        configs.append((config, parts))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(type(PROGRAMS["grpo"]), "train", no_train)
    monkeypatch.setattr(python_runs, "prepare", lambda config, without=(): None)
    return configs


def read(path: str) -> list[Any]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_the_names_are_those_of_the_module() -> None:
    for name in ("grpo", "sft", "dpo", "evaluate"):
        assert getattr(nemo_rl, name) is getattr(python_runs, name)
        assert name in nemo_rl.__all__


def test_grpo_writes_rows_and_keys(started: list[Any]) -> None:
    run = nemo_rl.grpo(
        "tiny-chat",
        ROWS,
        validation=ROWS[:2],
        reward=lambda answer, row: 1.0,
        steps=3,
        policy={"optimizer": {"kwargs": {"weight_decay": 0.5}}},
        **{"policy.optimizer.kwargs.lr": 1e-5, "grpo.seed": 7},
    )
    ((config, parts),) = started
    assert config.policy.model_name.endswith("examples/assets/tiny-chat")
    assert (config.grpo.max_num_steps, config.grpo.seed, config.grpo.val_at_end) == (3, 7, True)
    kwargs = config.policy.optimizer["kwargs"]
    assert (kwargs["lr"], kwargs["weight_decay"], kwargs["betas"]) == (1e-5, 0.5, [0.9, 0.999])
    assert read(config.data.train.data_path) == ROWS
    assert read(config.data.validation.data_path) == ROWS[:2]
    assert list(parts["environments"]) == ["reward"]
    assert run.folder == Path("results/grpo_001").absolute()
    assert config.checkpointing.checkpoint_dir.startswith(str(run.folder))
    assert config.cluster.device == "cpu"


def test_each_run_has_a_folder_of_its_own_unless_one_is_given(started: list[Any], tmp_path: Path) -> None:
    folders = [nemo_rl.grpo("tiny-chat", ROWS, reward=len, steps=1).folder.name for _ in range(2)]
    assert folders == ["grpo_001", "grpo_002"]
    assert nemo_rl.grpo("tiny-chat", ROWS, reward=len, folder="mine").folder == tmp_path / "mine"


def test_without_validation_nothing_is_validated(started: list[Any]) -> None:
    nemo_rl.grpo("tiny-chat", ROWS, reward=len, steps=1)
    nemo_rl.sft("tiny-chat", ROWS, steps=1)
    for config, _ in started:
        assert config.data.validation is None
        assert (config.algorithm.val_period, config.algorithm.val_at_end) == (0, False)


def test_rewards_with_weights_and_names(started: list[Any]) -> None:
    nemo_rl.grpo("tiny-chat", ROWS, reward={"right": lambda answer, row: 1.0, "long": (len, -0.1)}, steps=1)
    config, _ = started[0]
    assert config.env["reward"].weights == {"long": -0.1}
    assert config.env["reward"].function is None


def test_rewards_with_dotted_paths_are_in_the_configuration(started: list[Any]) -> None:
    nemo_rl.grpo("tiny-chat", ROWS, reward=["builtins.len", ("math.fabs", 2)], steps=1)
    config, parts = started[0]
    assert config.env["reward"].function == {"len": "builtins.len", "fabs": "math.fabs"}
    assert config.env["reward"].weights == {"fabs": 2.0}
    assert parts["environments"] == {}


def test_without_a_reward_answers_are_compared(started: list[Any]) -> None:
    nemo_rl.grpo("tiny-chat", ROWS, steps=1)
    config, parts = started[0]
    assert list(config.env) == ["math"]
    assert config.data.train.env_name == "math"
    assert parts["environments"] == {}


def test_supervised_rows(started: list[Any]) -> None:
    chat = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    nemo_rl.sft("tiny-chat", chat, steps=1)
    nemo_rl.sft("tiny-chat", [{"prompt": "a", "completion": "b"}], steps=1)
    nemo_rl.dpo("tiny-chat", [{"prompt": "a", "chosen": "b", "rejected": "c"}], steps=1)
    entries = [config.data.train for config, _ in started]
    assert [entry.dataset_name for entry in entries] == ["openai_format", "ResponseDataset", "BinaryPreferenceDataset"]
    assert (entries[1].input_key, entries[1].output_key) == ("prompt", "completion")


def test_rows_of_every_kind(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    assert data_keys(file, tmp_path, "prompt") == {"dataset_name": "PromptDataset", "data_path": str(file)}
    assert data_keys("owner/name", tmp_path, "prompt")["data_path"] == "owner/name"
    assert data_keys("gsm8k", tmp_path, "prompt") == {"dataset_name": "gsm8k"}
    table = datasets.Dataset.from_list(ROWS)
    assert read(data_keys(table, tmp_path, "prompt")["data_path"]) == ROWS
    made = data_keys((row for row in ROWS), tmp_path, "prompt")
    assert made == data_keys(ROWS, tmp_path, "prompt")
    numbers = data_keys([{"prompt": "a", "x": np.float64(1.5), "y": np.arange(2)}], tmp_path, "prompt")
    assert read(numbers["data_path"]) == [{"prompt": "a", "x": 1.5, "y": [0, 1]}]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "rows is empty. Give a list of dicts"),
        (datasets.Dataset.from_list([]), "rows is a data set without rows"),
        (None, "rows is a NoneType"),
        (3, "rows is a int"),
        ({"prompt": ["a"]}, "rows is a dict"),
        (["text"], r"rows\[0\] is a str, not a dict"),
        ([{"prompt": "a"}, {"prompt": "b", "when": object()}], r"rows\[1\] has <object .* in the column 'when'"),
        ([{"prompt": "a", "x": float("nan")}], r"rows\[0\] has nan in the column 'x'"),
    ],
)
def test_rows_that_cannot_be_used(rows: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        data_keys(rows, tmp_path, "prompt")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"policy.optimiser.kwargs.lr": 1}, "optimiser.*optimizer"),
        ({"grpo": {"num_promts_per_step": 8}}, "num_promts_per_step.*num_prompts_per_step"),
        ({"nosuch": 1}, "nosuch"),
        ({"policy.optimizer.lr": 1}, "policy.optimizer.lr.*'policy.optimizer.kwargs.lr'"),
        ({"learning_rate": 1e-5}, "learning_rate.*'policy.optimizer.kwargs.lr'"),
        ({"reward_funcs": [len]}, "reward_funcs.*'reward'"),
        ({"scorer": len}, "scorer is a function.*reward="),
        ({"grpo.max_num_steps": "many"}, "grpo.max_num_steps"),
    ],
)
def test_a_wrong_key_is_refused_and_leaves_no_folder(
    keys: dict[str, Any], message: str, started: list[Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        nemo_rl.grpo("tiny-chat", ROWS, reward=len, **keys)
    assert started == []
    assert list((tmp_path / "results").iterdir()) == []


@pytest.mark.parametrize("reward", [[], {}, {"a": (len,)}, {"a": (len, "b")}, [(len, True)]])
def test_wrong_weights_are_refused(reward: Any) -> None:
    with pytest.raises(ConfigError, match=r"reward is empty|not a pair of a function and its weight"):
        _ = GivenRewards(reward).section


def test_names_of_rewards() -> None:
    def right(answer: str) -> float:
        return 1.0

    section = GivenRewards([right, (lambda answer: 1.0, 0.5), right]).section["reward"]
    assert section == {"weights": {"reward_2": 0.5}}


def test_metrics_of_a_resumed_run_are_joined(tmp_path: Path) -> None:
    for number, steps in ((1, (1, 2)), (2, (2, 3))):
        folder = tmp_path / f"exp_00{number}"
        folder.mkdir()
        lines = [{"step": step, "prefix": "train", "metrics": {"reward": step * number}, "time": 0} for step in steps]
        lines.append({"step": 10, "prefix": "ray", "metrics": {"node.0.cpu_percent": 50.0}, "time": 0})
        lines.append({"step": 3, "prefix": "validation", "metrics": {"accuracy": number}, "time": 0})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = RunMetrics.of_logs(tmp_path)
    assert metrics.columns == {
        "step": [1, 2, 3],
        "train/reward": [1, 4, 6],
        "validation/accuracy": [None, None, 2],
    }
    assert dict(metrics) == {"train/reward": 6, "validation/accuracy": 2}


def test_a_program_key_is_like_one_of_a_file() -> None:
    config = load_config("grpo_math_cpu.yaml", program_keys={"grpo": {"seed": 5}})
    assert config.grpo.seed == 5
    assert config.policy.max_total_sequence_length == 128


def test_a_program_that_calls_setup_sees_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_rl.algorithms import grpo, sft
    from nemo_rl.algorithms.setup import user_parts
    from nemo_rl.evals import evaluator

    calls: list[int] = []
    for module in (user_parts, evaluator):
        monkeypatch.setattr(module, "show_messages", lambda: calls.append(1))
    for setup in (grpo.setup, sft.setup, evaluator.setup):
        with pytest.raises(ConfigError):
            setup({"nosuch": 1})
    assert calls == [1, 1, 1]


def test_messages_are_shown_unless_logging_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_rl.utils import logging_setup

    calls: list[int] = []
    monkeypatch.setattr(logging_setup, "configure_logging", lambda: calls.append(1))
    root, library = logging.getLogger(), logging.getLogger("nemo_rl")
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(library, "handlers", [])
    monkeypatch.setattr(library, "level", logging.NOTSET)
    logging_setup.show_messages()
    assert calls == [1]
    monkeypatch.setattr(library, "level", logging.ERROR)
    logging_setup.show_messages()
    assert calls == [1]
