"""The commands of the evaluation guide are accepted as written there."""

import re
import shlex

import pytest
from eval_helpers import ROOT

from nemo_rl.config import EvalMasterConfig, load_config
from nemo_rl.config.loading.overrides import dotlist_to_overrides

pytestmark = pytest.mark.fast

GUIDE = (ROOT / "docs/algorithms/eval.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"^```sh\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)
    for line in block.replace("\\\n", " ").splitlines()
    if "run_eval.py" in line
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[-1])
def test_the_commands_of_the_guide_load(command, tmp_path, monkeypatch) -> None:
    (tmp_path / "results/grpo_cpu/step_80/policy/weights/model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    arguments = command[command.index("examples/run_eval.py") + 1 :]
    config = "examples/configs/evals/eval.yaml"
    if arguments[:1] == ["--config"]:
        config, arguments = arguments[1], arguments[2:]
    assert load_config(config, dotlist_to_overrides(arguments), schema=EvalMasterConfig).policy.model_name


def test_the_guide_covers_all_commands_and_data_sets() -> None:
    from nemo_rl.config.rules.evaluation import EVAL_DATASET_NAMES

    assert len(COMMANDS) == 5  # those of the blocks `sh`
    named = {name for name in EVAL_DATASET_NAMES if not name.startswith("mmlu_") or name == "mmlu_pro"}
    assert [name for name in named if f"`{name}`" not in GUIDE] == []
