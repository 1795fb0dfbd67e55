"""Output heads of a run's models, which are compared with their use before anything starts."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification

from nemo_rl.algorithms.setup.preflight import check_backends
from nemo_rl.config import (
    REPOSITORY_ROOT,
    DistillationMasterConfig,
    GRPOMasterConfig,
    PPOMasterConfig,
    RMMasterConfig,
    load_config,
)
from nemo_rl.utils.errors import ConfigError

TINY_CHAT = REPOSITORY_ROOT / "examples/assets/tiny-chat"
NAMES = ["helpfulness", "correctness", "verbosity"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reward models with one score and with three."""
    made = {name: tmp_path_factory.mktemp("heads") / name for name in ("one", "three")}
    for labels, folder in ((["score"], made["one"]), (NAMES, made["three"])):
        named = dict(enumerate(labels))
        AutoModelForSequenceClassification.from_pretrained(TINY_CHAT, id2label=named).save_pretrained(folder)
    return made


def checked(example: str, schema: Any, *overrides: str) -> None:
    config = load_config(REPOSITORY_ROOT / f"examples/configs/{example}.yaml", list(overrides), schema=schema)
    check_backends(config.models, config.model_cluster)


def test_a_critic_may_begin_with_a_reward_model_with_one_score(folders: dict[str, Path]) -> None:
    checked("ppo_math_cpu", PPOMasterConfig, f"value.model_name={folders['one']}")


REFUSED: dict[str, tuple[str, Any, str, str]] = {
    "critic with three scores": (
        "ppo_math_cpu",
        PPOMasterConfig,
        "value.model_name={three}",
        r"^value.model_name=.* 3 scores \(helpfulness, correctness, verbosity\), .* a critic \(value\) has one score",
    ),
    "three scores for two attributes": (
        "rm_regression_cpu",
        RMMasterConfig,
        "policy.model_name={three}",
        "^policy.model_name=.* 3 scores .* but a model with 2 is wanted",
    ),
    "policy": ("grpo_opd_cpu", GRPOMasterConfig, "policy.model_name={one}", "^policy.model_name=.* Name a language"),
    "teacher": (
        "distillation_math_cpu",
        DistillationMasterConfig,
        "teacher.model_name={one}",
        "^teacher.model_name=.* is a sequence classifier .* Name a language model in teacher.model_name",
    ),
    "teacher of an environment": (
        "grpo_opd_cpu",
        GRPOMasterConfig,
        "on_policy_distillation.teacher_model_by_agent_name.math={one}",
        "^teachers.math.model_name=.* is a sequence classifier",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_head_for_another_use_is_refused(case: str, folders: dict[str, Path]) -> None:
    example, schema, override, reason = REFUSED[case]
    with pytest.raises(ConfigError, match=reason):
        checked(example, schema, override.format(**folders))
