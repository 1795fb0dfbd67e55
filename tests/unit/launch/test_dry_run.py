"""`--dry-run`: recipes fit the GPUs they are for, others are refused with the numbers, and nothing is started."""

import re
from pathlib import Path
from typing import Any

import pytest
import ray

from nemo_rl.algorithms.credit.advantages import make_advantage_estimator
from nemo_rl.algorithms.setup import memory_forecast
from nemo_rl.algorithms.setup.memory_forecast import DEFAULT_GPU_GB, device_bytes
from nemo_rl.commands.dry_run import data_lines, describe
from nemo_rl.config import (
    REPOSITORY_ROOT,
    ClusterConfig,
    DistillationMasterConfig,
    DPOMasterConfig,
    EvalMasterConfig,
    GRPOMasterConfig,
    SFTMasterConfig,
    load_config,
)
from nemo_rl.launch.command_line import launch
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.losses.preference import VARIANTS, make_variant
from nemo_rl.models.capacity.hub_configs import FOLDER, known_models, with_local_configs
from nemo_rl.models.dtensor.training_backend import DTensorTraining
from nemo_rl.models.huggingface.sizes import count_parameters
from nemo_rl.utils.errors import ConfigError, DataError
from tools import generate_recipe_table as tool

RECIPES = REPOSITORY_ROOT / "examples/configs/recipes/llm"
CONFIGS = REPOSITORY_ROOT / "examples/configs"
GIB = 2**30


PUBLISHED = {
    "Qwen/Qwen2.5-1.5B": 1.54e9,
    "Qwen/Qwen2.5-Math-1.5B-Instruct": 1.54e9,
    "Qwen/Qwen2.5-32B": 32.8e9,
    "Qwen/Qwen3-1.7B-Base": 1.72e9,
    "Qwen/Qwen3-4B": 4.02e9,
    "Qwen/Qwen3-4B-Base": 4.02e9,
    "Qwen/Qwen3-32B": 32.8e9,
    "Qwen/Qwen3-30B-A3B": 30.5e9,
    "Qwen/Qwen3-235B-A22B": 235e9,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1.78e9,
    "deepseek-ai/DeepSeek-V3": 671e9,
    "meta-llama/Llama-3.1-8B": 8.03e9,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03e9,
    "meta-llama/Llama-3.1-70B-Instruct": 70.6e9,
    "meta-llama/Llama-3.2-1B": 1.24e9,
    "meta-llama/Llama-3.2-1B-Instruct": 1.24e9,
}
"""Parameters as the models' pages give them; DeepSeek-V3 without its head for several tokens."""


@pytest.fixture(autouse=True)
def no_gpu_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_forecast, "gpu_bytes", lambda: None)


def recipe_of(name: str, *overrides: str) -> Any:
    return tool.recipe(RECIPES / f"{name}.yaml", *overrides)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_fits_its_gpus(path: Path) -> None:
    """Its name says the machines, and its tables are there."""
    recipe = tool.recipe(path)
    assert recipe.forecast.shortfalls == []
    assert f"fits 93% of the {tool.GPU_GB} GiB of each GPU" in recipe.text
    found = re.fullmatch(r"[a-z]+-[a-z0-9.-]+-(\d+)n(\d+)g-\w+(-\w+)?", path.stem)
    cluster = recipe.config.cluster
    assert found is not None and (cluster.num_nodes, cluster.gpus_per_node) == (int(found[1]), int(found[2]))
    for part in ("Layout", "One training step", "Memory", "Checkpoint", "Verdict", "  weights", "optimizer state"):
        assert part in recipe.text
    assert recipe.checkpoint > 0


def test_the_page_of_recipes_is_current() -> None:
    assert tool.DEFAULT_PAGE.read_text(encoding="utf-8") == tool.page(), "run python tools/generate_recipe_table.py"


def run_not(config: Any) -> None:
    raise AssertionError("a dry run starts nothing")


def test_a_recipe_too_large_for_its_gpus_is_refused_with_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """32.76e9 parameters x 16 bytes / 8 ranks of one machine instead of 128: 61.0 GiB of state."""
    ran_before = ray.is_initialized()
    file = str(RECIPES / "grpo-qwen2.5-32b-16n8g-fsdp2tp8.yaml")
    arguments = ["--config", file, "--dry-run", "cluster.num_nodes=1", "cluster.gpu_memory_gb=80"]
    assert launch("", Path(file), GRPOMasterConfig, run_not, [*arguments, "cluster.gpu_memory_gb=64"]) == 1
    said = capsys.readouterr().out
    needs, more, usable = map(
        float, re.findall(r"needs ([\d.]+) GiB .* ([\d.]+) GiB more than the ([\d.]+) GiB", said)[0]
    )
    assert usable == pytest.approx(64 * 0.93, abs=0.1) and needs - usable == pytest.approx(more, abs=0.11)
    assert needs > 32.76e9 * 16 / 8 / GIB and "does NOT fit" in said and "tensor_parallel_size" in said
    assert launch("", Path(file), GRPOMasterConfig, run_not, ["--config", file, "--dry-run"]) == 0
    assert ray.is_initialized() == ran_before


def test_a_wrong_configuration_is_refused_as_in_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """By keys, by keys against each other, by the model's sizes, by those of the engines."""
    file = RECIPES / "grpo-llama3.1-8b-instruct-1n8g-fsdp.yaml"
    for override, message in {
        "grpo.sed=1": "Did you mean",
        "policy.train_global_batch_size=500": "train_global_batch_size=500",
        "policy.dtensor_cfg.tensor_parallel_size=3": "8 ranks are no multiple of 3",
        "policy.generation.engine.tensor_parallel_size=16": "are 2 machines of 8 generation ranks, and there is 1",
        "policy.model_name=no-such-user/knows-this": "is not here",
    }.items():
        assert launch("", file, GRPOMasterConfig, run_not, ["--dry-run", override]) == 2
        assert message in capsys.readouterr().err
    assert (
        launch("", file, GRPOMasterConfig, run_not, ["--dry-run", "policy.dtensor_cfg.pipeline_parallel_size=8"]) == 0
    )


def test_rows_of_local_files_are_refused_as_in_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, file = tmp_path / "rows.jsonl", CONFIGS / "grpo_math_cpu.yaml"
    keys = ["data.train.dataset_name=PromptDataset", f"data.train.data_path={rows}"]

    def found(row: str, count: int = 8, *more: str) -> str:
        rows.write_text(f"{row}\n" * count)
        return "".join(data_lines(load_config(file, [*keys, *more])))

    good = '{"prompt": "2+2=", "answer": "4"}'
    assert found(good) == "  data          8 rows to train, 128 to validate"
    assert found(good, 8, "data.validation.dataset_name=gsm8k").endswith("because gsm8k is not on this machine")
    assert "".join(data_lines(load_config(file))) == ""
    with pytest.raises(DataError, match="7 rows, fewer than one batch of 8"):
        found(good, 7)
    with pytest.raises(DataError, match="'prompt' is an object, not text"):
        found('{"prompt": {"a": 1}, "answer": "4"}')
    with pytest.raises(DataError, match="missing 'prompt'"):
        found('{"pronpt": "2+2=", "answer": "4"}')
    assert launch("", file, GRPOMasterConfig, run_not, ["--dry-run", *keys]) == 2
    assert "missing 'prompt'" in capsys.readouterr().err


def test_an_engine_without_room_for_an_answer_is_refused() -> None:
    recipe = recipe_of("grpo-llama3.1-8b-instruct-1n8g-fsdp", "policy.generation.engine.gpu_memory_utilization=0.22")
    (problem,) = recipe.forecast.shortfalls
    assert "less than one answer of max_model_len=4096" in problem


def test_memory_by_hand() -> None:
    """Weights, state and cache of models whose arithmetic is written next to the recipes."""
    moe = recipe_of("grpo-qwen3-30ba3b-2n8g-megatron").forecast
    training = moe.groups["policy + generation"].moments["training"]
    experts = 48 * 128 * 3 * 2048 * 768
    held = experts / 8 + (30.532e9 - experts) / 2
    assert training["weights"] == pytest.approx(2 * held, rel=0.01)
    assert training["gradients"] == pytest.approx(4 * held, rel=0.01), "summed in float32"
    state = 12 * (experts / 8 / 2 + (30.532e9 - experts) / 2 / 8)
    assert training["optimizer state"] == pytest.approx(state, rel=0.01)

    dense = recipe_of("grpo-llama3.1-8b-instruct-1n8g-fsdp").forecast
    phases = dense.groups["policy + generation"].moments
    assert phases["training"]["weights"] == pytest.approx(4 * 8.03e9 / 8, rel=0.001)
    assert phases["training"]["optimizer state"] == pytest.approx(8 * 8.03e9 / 8, rel=0.001)
    engine = {kind: size for kind, size in phases["generation"].items() if kind != "weights"}
    assert engine["engine's weights"] == pytest.approx(2 * 8.03e9, rel=0.001)
    assert sum(engine.values()) == pytest.approx(0.6 * 80 * GIB)
    assert dense.cache_tokens == engine["key-value cache"] / (32 * 2 * 8 * 128 * 2)
    assert phases["training"]["sleeping engine"] == phases["log-probs"]["sleeping engine"] == 3 * GIB
    assert "sleeping engine" not in phases["generation"]
    assert "optimizer state" not in phases["generation"] and phases["weight sync"]["weights"] > 0
    host = dense.groups["policy + generation"].host
    assert host["reference weights and their place"] == pytest.approx(2 * 4 * 8.03e9 / 8, rel=0.001)

    saving = recipe_of("grpo-llama3.1-8b-instruct-1n8g-fsdp", "checkpointing.is_async=true").forecast
    staged = saving.groups["policy + generation"].host["copy for a checkpoint"]
    assert staged == pytest.approx(12 * 8.03e9 / 8, rel=0.001) and "copy for a checkpoint" not in host

    latent = recipe_of("sft-deepseek-v3-32n8g-megatron").forecast.groups["policy"].moments["training"]
    one_expert, whole = 3 * 7168 * 2048, 7168 * (1536 + 512 + 64 + 256)
    layer = 4 * (256 * one_expert / 16 + (233.0e6 - whole) / 8 + whole)
    assert latent["weights"] == pytest.approx(2 * layer, rel=0.02)


def test_a_teacher_shares_or_has_devices_of_its_own() -> None:
    name = "distillation-qwen3-32b-to-4b-base-1n8g-fsdp"
    shared = recipe_of(name).forecast.groups
    assert list(shared) == ["policy + teacher + generation"]
    scores = shared["policy + teacher + generation"].moments["teacher's scores"]
    assert scores["teacher's weights"] == pytest.approx(2 * 32.76e9 / 8, rel=0.001)
    assert scores["weights"] == pytest.approx(4 * 4.022e9 / 8, rel=0.001) and "optimizer state" not in scores
    apart = recipe_of(
        name,
        "cluster.num_nodes=2",
        "teacher.colocated.enabled=false",
        "teacher.colocated.resources.num_nodes=1",
    )
    assert list(apart.forecast.groups) == ["policy + generation", "teacher"]
    assert "teacher       Qwen/Qwen3-32B by dtensor_cfg, 8 ranks (1 node x 8): fsdp 8\n" in apart.text


def test_engines_on_nodes_of_their_own() -> None:
    recipe = recipe_of(
        "grpo-llama3.1-8b-instruct-1n8g-fsdp",
        "cluster.num_nodes=3",
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources={num_nodes: 1, gpus_per_node: 8}",
    )
    assert list(recipe.forecast.groups) == ["policy", "generation"]
    assert "sleeping engine" not in recipe.forecast.groups["policy"].moments["training"]
    assert "16 ranks (2 nodes x 8): fsdp 16" in recipe.text
    assert "8 engines of 1 device (tensor 1 x pipeline 1), 8 on each of 1 node\n" in recipe.text
    assert "32 rows for each of 16 data-parallel ranks, packed into 8192 tokens: at most 16 an update" in recipe.text


def test_an_engine_over_two_nodes() -> None:
    """Experts are divided over all of its ranks, the other layers over those of a replica."""
    sizes = "policy.generation.engine={tensor_parallel_size: 4, expert_parallel_size: 16}"
    recipe = recipe_of("grpo-qwen3-30ba3b-2n8g-megatron", sizes)
    assert "1 engine of 16 devices (tensor 4 x pipeline 1 x data 4), each on 2 of 2 nodes, on the" in recipe.text
    experts = 48 * 128 * 3 * 2048 * 768
    weights = recipe.forecast.groups["policy + generation"].moments["generation"]["engine's weights"]
    assert weights == pytest.approx(2 * (experts / 16 + (30.532e9 - experts) / 4), rel=0.001)


def test_evaluations_and_cpus_have_dry_runs() -> None:
    text = describe(load_config(CONFIGS / "evals/eval.yaml", schema=EvalMasterConfig)).text
    assert "One training step" not in text and "key-value cache" in text and "fits 93% of the 80 GiB" in text
    description = describe(load_config(CONFIGS / "grpo_math_cpu.yaml", schema=GRPOMasterConfig))
    assert list(description.forecast.groups) == ["policy", "generation"] and "of each process" in description.text


def test_what_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As described, else as it is here, else 80 GiB."""
    assert device_bytes(ClusterConfig.build()) == DEFAULT_GPU_GB * GIB
    monkeypatch.setattr(memory_forecast, "gpu_bytes", lambda: 24.0 * GIB)
    assert device_bytes(ClusterConfig.build()) == 24 * GIB
    assert device_bytes(ClusterConfig.build(gpu_memory_gb=141)) == 141 * GIB
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere")
    assert device_bytes(ClusterConfig.build()) == DEFAULT_GPU_GB * GIB


def test_what_is_not_known_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the verdict too, of each model that shares the devices."""
    monkeypatch.setattr(DTensorTraining, "predict_memory", lambda self, *arguments, **more: None)
    config = load_config(RECIPES / "distillation-qwen3-32b-to-4b-base-1n8g-fsdp.yaml", schema=DistillationMasterConfig)
    (verdict,) = describe(config).text.split("Verdict\n")[1:]
    assert ", as far as it is known. This training backend predicts no memory.\n" in verdict


def test_offload_for_log_probs_is_seen() -> None:
    name = "grpo-llama3.1-8b-instruct-1n8g-fsdp"
    stays, goes = (
        recipe_of(name, f"policy.offload_optimizer_for_logprob={value}").forecast.groups["policy + generation"]
        for value in ("false", "true")
    )
    assert "optimizer state" in stays.moments["log-probs"] and "optimizer state" not in goes.moments["log-probs"]


def test_known_sizes_give_the_published_number_of_parameters() -> None:
    assert known_models() == sorted(PUBLISHED)
    for name, published in PUBLISHED.items():
        assert count_parameters(str(FOLDER / name)) == pytest.approx(published, rel=0.01), name


def test_a_model_that_is_here_is_asked_itself() -> None:
    config = load_config(CONFIGS / "sft_cpu.yaml", schema=SFTMasterConfig)
    assert with_local_configs(config).policy.model_name == config.policy.model_name
    known = load_config(CONFIGS / "sft.yaml", schema=SFTMasterConfig)
    assert with_local_configs(known).policy.model_name == str(FOLDER / "meta-llama/Llama-3.2-1B")
    assert known.policy.model_name == "meta-llama/Llama-3.2-1B"
    with pytest.raises(ConfigError, match="no-such-user/knows-this.*Qwen/Qwen3-32B"):
        with_local_configs(
            load_config(CONFIGS / "sft.yaml", ["policy.model_name=no-such-user/knows-this"], SFTMasterConfig)
        )


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["loss_fn.reference_policy_kl_penalty=0"],
        ["loss_fn.use_kl_in_reward=true", "grpo.adv_estimator.name=reinforce_plus_plus"],
    ],
)
def test_a_run_keeps_the_reference_that_its_losses_need(overrides: list[str]) -> None:
    config = load_config(CONFIGS / "grpo_math_1B.yaml", overrides)
    credit = make_advantage_estimator(config.grpo, config.loss_fn).needs_logprobs
    assert config.keeps_reference == (ClippedPGLossFn(config.loss_fn).needs_reference or credit)


@pytest.mark.parametrize("name", VARIANTS)
def test_preference_losses_keep_the_reference_that_they_need(name: str) -> None:
    config = load_config(CONFIGS / "dpo.yaml", [f"dpo.preference_loss={name}"], DPOMasterConfig, check=False)
    assert config.keeps_reference == make_variant(name, 0.1, 0.0, 0.5).needs_reference
