"""Keys of float8 generation and training: NeMo RL's spelling loads, and what cannot run is refused before a start."""

import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl.config import REPOSITORY_ROOT, load_config
from nemo_rl.config.loading.all_errors import collect_errors
from nemo_rl.config.rules.topology import row_length_multiple
from nemo_rl.utils.errors import ConfigError

GENERATION = """
defaults: {base}
cluster: {{device: cuda, gpus_per_node: 8}}
policy:
  precision: bfloat16
  generation:
    vllm_cfg:
      precision: fp8
      use_deep_gemm: true
      num_first_layers_in_bf16: 1
      num_last_layers_in_bf16: 2
      quantization_ignored_layer_kws: [q_proj, k_proj, v_proj]
      pow2_weight_scaling_factors: true
      pow2_activation_scaling_factors: true
      kv_cache_dtype: fp8
"""
TRAINING = """
defaults: {base}
cluster: {{device: cuda, gpus_per_node: 8}}
policy:
  precision: bfloat16
  dtensor_cfg: {{enabled: false}}
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 2
    sequence_parallel: true
    fp8_cfg: {{enabled: true, fp8: hybrid, fp8_recipe: blockwise, fp8_param: false, force_clear_fp8_caches: true}}
  generation:
    vllm_cfg: {{precision: fp8, is_mx: true, tensor_parallel_size: 2}}
"""
BASE = REPOSITORY_ROOT / "examples/configs/grpo_math_1B.yaml"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    found = {"generation": GENERATION, "training": TRAINING}
    paths = {name: tmp_path / f"{name}.yaml" for name in found}
    for name, path in paths.items():
        path.write_text(found[name].format(base=BASE))
    return paths


def test_configurations_of_nemo_rl_with_float8_load(files: dict[str, Path]) -> None:
    command = [sys.executable, "tools/check_nemo_rl_config.py", *map(str, files.values())]
    done = subprocess.run(command, cwd=REPOSITORY_ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("(grpo): loads") == 2
    policy = load_config(files["training"]).policy
    assert policy.megatron_cfg.fp8_cfg.fp8 == "hybrid" and policy.generation.vllm_cfg.is_mx
    assert row_length_multiple(policy) == 2 * 128
    policy.megatron_cfg.fp8_cfg.fp8_recipe = "mxfp8"
    assert row_length_multiple(policy) == 2 * 32
    policy.megatron_cfg.fp8_cfg.enabled = False
    assert row_length_multiple(policy) == 2


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("generation", ["policy.generation.backend=hf"], r"kv_cache_dtype=fp8 works with .*backend=vllm only, got hf"),
        (
            "generation",
            ["policy.generation.vllm_cfg.kv_cache_dtype=auto", "policy.generation.backend=hf"],
            r"precision=fp8 on GPUs works with policy\.generation\.backend=vllm only, got hf",
        ),
        ("generation", ["policy.generation.vllm_cfg.use_deep_gemm=false"], r"needs? .*use_deep_gemm=true"),
        ("generation", ["policy.precision=float32"], r"policy\.precision=float32.*Set policy\.precision=bfloat16"),
        ("generation", ["policy.generation.vllm_cfg.is_mx=true"], r"pow2_weight_scaling_factors=true has no effect"),
        ("generation", ["policy.generation.vllm_cfg.kv_cache_dtype=fp4"], r"Allowed: auto or fp8 or fp8_e4m3"),
        ("training", ["cluster.device=cpu", "cluster.gpus_per_node=0"], r"fp8_cfg\.enabled=true needs NVIDIA GPUs"),
        ("training", ["policy.megatron_cfg.transformer_impl=local"], r"Leave transformer_impl out"),
        ("training", ["policy.megatron_cfg.fp8_cfg.fp8_param=true"], r"not built yet: weights of training that are"),
        ("training", ["policy.precision=float32"], r"fp8_cfg\.enabled=true with policy\.precision=float32"),
    ],
)
def test_what_cannot_run_is_refused_before_a_start(
    files: dict[str, Path], name: str, overrides: list[str], message: str
) -> None:
    assert any(overrides)
    with pytest.raises(ConfigError, match=rf"(?s){message}"):
        load_config(files[name], overrides)


def test_float8_generation_on_a_cpu_needs_no_other_key(files: dict[str, Path]) -> None:
    cpu = ["cluster.device=cpu", "cluster.gpus_per_node=0", "policy.precision=float32"]
    assert collect_errors(files["generation"], "grpo", cpu) == []
    assert collect_errors(files["generation"], "grpo", [*cpu, "policy.generation.vllm_cfg.use_deep_gemm=false"]) == []
