"""With `policy.zero_mismatch`, log-probabilities of an engine and of the policy's model have the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.config.rules.engines import check_zero_mismatch

CHILD = Path(__file__).with_name("zero_mismatch_child.py")
TOOLS = Path(__file__).parents[4] / "tools"
TYPES = ("llama", "qwen3_moe", "gemma2")
MORE_TYPES = (
    *("gemma3_text", "cohere2", "qwen2", "qwen3", "mistral", "olmo2", "phi3", "glm4", "smollm3", "gpt_oss"),
    *("deepseek_v3", "glm4_moe"),
)


def found(*arguments: str) -> dict[str, Any]:
    """Return what a process finds that samples with an engine, and scores with the policy's model."""
    path = os.pathsep.join([str(TOOLS), *sys.path])
    done = subprocess.run(
        [sys.executable, str(CHILD), *arguments],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    result: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            result |= json.loads(line)
    return result


def require_equal(result: dict[str, Any], types: tuple[str, ...]) -> None:
    """Check that all tokens were compared in all layouts, and that none has other bits."""
    assert result.keys() == set(types)
    for model_type, of_formats in result.items():
        assert isinstance(of_formats, dict), (model_type, of_formats)
        assert of_formats.keys() == {"float32", "bfloat16"}
        for layouts in of_formats.values():
            assert layouts.keys() == {"alone", "padded", "packed", "shared"}
            assert all(tokens > 100 and others == 0 for tokens, others in layouts.values()), (model_type, layouts)


def test_engine_and_policy_have_the_same_bits() -> None:
    require_equal(found(*TYPES), TYPES)


@pytest.mark.long
def test_more_models_have_the_same_bits() -> None:
    require_equal(found(*MORE_TYPES), MORE_TYPES)


def test_the_comparison_finds_other_bits() -> None:
    layouts = found("--plain", "llama")["llama"]["float32"]
    assert all(others > tokens / 10 for tokens, others in layouts.values())


def policy(**values: Any) -> PolicyConfig:
    generation = {"backend": "hf", **values.pop("generation", {})}
    return PolicyConfig.build(model_name="m", zero_mismatch=True, generation=generation, **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"generation": {"backend": "sglang"}}, "backend=sglang has kernels of its own"),
        ({"generation": {"backend": "megatron"}}, "needs a policy of policy.megatron_cfg"),
        ({"dtensor_cfg": {"tensor_parallel_size": 2}}, "dtensor_cfg.tensor_parallel_size=2"),
        ({"precision": "float32", "generation": {"engine": {"precision": "bfloat16"}}}, "needs one number format"),
        ({"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 4}}}, "round otherwise with adapters"),
    ],
)
def test_settings_with_other_bits_are_refused(values: dict[str, Any], message: str) -> None:
    found = list(check_zero_mismatch(policy(**values), ClusterConfig.build(device="cpu", gpus_per_node=0)))
    assert len(found) == 1 and message in found[0]


def test_gpus_are_refused() -> None:
    found = list(check_zero_mismatch(policy(), ClusterConfig.build(device="cuda", gpus_per_node=1)))
    assert len(found) == 1 and "on CPUs only" in found[0]


def test_the_name_in_megatron_cfg_has_the_same_meaning() -> None:
    assert not PolicyConfig.build(model_name="m").zero_mismatch
    assert PolicyConfig.build(model_name="m", megatron_cfg={"zero_train_gen_mismatch": True}).zero_mismatch
