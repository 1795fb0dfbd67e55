"""The rules on agent programs and their endpoint."""

from pathlib import Path

import pytest

from nemo_rl.config import load_config
from nemo_rl.utils.errors import ConfigError

CONFIG = Path(__file__).resolve().parents[3] / "examples/configs/grpo_agent_cpu.yaml"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env.agent.program=null"], "exactly one of program, command and service"),
        (["env.agent.service=http://localhost:1"], "exactly one of program, command and service"),
        (["env.agent.readable=[/tmp]"], "readable belongs to command"),
        (["env.agent.timeout_s=700"], "must be less than step_timeout_s"),
        (
            ["env.agent.credit=last", "grpo.adv_estimator.credit=turn_returns"],
            r"env.agent.credit=last trains one conversation .* Use grpo.adv_estimator.credit=episode",
        ),
        (
            ["cluster.rollout_runners=1", "cluster.agent_endpoint.port=8000"],
            "cluster.agent_endpoint has port=8000 .* Leave both out",
        ),
        (["cluster.agent_endpoint.port=70000"], "cluster.agent_endpoint.port"),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(CONFIG, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["env.agent.credit=last"],
        ["env.agent.program=null", "env.agent.command=[python,/a/b.py]"],
        ["cluster.rollout_runners=1", "cluster.agent_endpoint.host=0.0.0.0"],
    ],
)
def test_what_works_loads(overrides: list[str]) -> None:
    assert load_config(CONFIG, overrides).env["agent"].max_calls == 64
