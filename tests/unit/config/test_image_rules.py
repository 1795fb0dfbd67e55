"""Combinations that are refused for a policy that reads images, each by its key."""

from pathlib import Path

import pytest

from nemo_rl.config import load_config
from nemo_rl.config.loading.algorithms import ALGORITHMS
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.fast

CONFIGS = Path(__file__).resolve().parents[3] / "examples/configs"
READS = "policy.tokenizer.use_processor=true"


def load(name: str, *overrides: str) -> object:
    return load_config(CONFIGS / f"{name}.yaml", list(overrides), schema=ALGORITHMS[name.split("_")[0]])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy.is_vlm=false"], "policy.is_vlm=false, but policy.tokenizer.use_processor=true"),
        (["policy.dtensor_cfg.tensor_parallel_size=2"], "dtensor_cfg.tensor_parallel_size=2"),
        (["policy.dtensor_cfg.context_parallel_size=2"], "dtensor_cfg.context_parallel_size=2"),
        (["policy.dtensor_cfg.pipeline_parallel_size=2"], "dtensor_cfg.pipeline_parallel_size=2"),
        (
            ["policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true"],
            "Megatron Core gets no images",
        ),
        (["policy.generation.backend=sglang"], "backend=sglang gets no images"),
        (["policy.generation.vllm_cfg.tensor_parallel_size=2"], "tensor_parallel_size=2 is not proven with images"),
        (["policy.generation.vllm_cfg.precision=fp8"], "precision=fp8 is not proven"),
        (["+policy.generation.vllm_kwargs.mm_device_do_normalize=true"], "mm_device_do_normalize: with images"),
        (["+policy.generation.vllm_kwargs.mm_processor_kwargs={a: 1}"], "mm_processor_kwargs: with images"),
        (["policy.generation.weight_sync.recompute_kv_cache=false"], "keeps features of images from older weights"),
    ],
)
def test_what_is_not_proven_with_images_is_refused_by_its_key(overrides: list[str], message: str) -> None:
    load("grpo_math_cpu", READS)
    with pytest.raises(ConfigError) as refused:
        load("grpo_math_cpu", READS, *overrides)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", ["ppo_math_cpu", "distillation_math_cpu", "rm_cpu"])
def test_other_algorithms_refuse_images(name: str) -> None:
    with pytest.raises(ConfigError, match="images are read with GRPO, SFT and DPO"):
        load(name, READS)


@pytest.mark.parametrize("name", ["sft_cpu", "dpo_cpu"])
def test_supervised_algorithms_read_images(name: str) -> None:
    load(name, READS)


@pytest.mark.parametrize("key", ["audio", "video"])
def test_sound_and_video_are_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=f"policy.tokenizer.{key}"):
        load("grpo_math_cpu", READS, f"+policy.tokenizer.{key}={{a: 1}}")
