"""GRPO with Megatron Core, end to end on the CPU: two ranks that share each layer, then two stages."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
import torch
from example_runs import GRPOExample, StartExample, of_training, read_metrics, run_script
from transformers import AutoModelForCausalLM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]

CONFIG = "grpo_math_cpu_megatron.yaml"
COMMON = (
    "grpo.max_num_steps=3",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    "checkpointing.save_period=1",
    "cluster.ranks_per_node=2",
)
TENSOR_PARALLEL = ("policy.megatron_cfg.tensor_model_parallel_size=2", "policy.megatron_cfg.sequence_parallel=true")
STAGES = ("policy.megatron_cfg.pipeline_model_parallel_size=2",)


@pytest.mark.long
def test_a_killed_run_resumes_on_two_stages_and_is_exported(
    start_example: StartExample, grpo_example: GRPOExample, tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    overrides = (*COMMON, f"checkpointing.checkpoint_dir={checkpoints}")
    killed = start_example("run_grpo.py", CONFIG, *overrides, *TENSOR_PARALLEL, logs="killed")
    killed.wait_for("step 2/3")
    killed.processes()
    killed.process.kill()
    killed.finish()
    assert killed.survivors() == []
    shutil.rmtree(checkpoints / "step_2", ignore_errors=True)  # the checkpoint may or may not be complete here

    resumed = start_example("run_grpo.py", CONFIG, *overrides, *STAGES, "checkpointing.save_consolidated=true")
    assert resumed.finish() == 0, resumed.log()[-3000:]
    assert "Resuming from" in resumed.log()
    before, after = (of_training(read_metrics(run.log_dir)) for run in (killed, resumed))
    losses = {step: value for (_, step, name), value in (before | after).items() if name == "loss"}
    assert {step for _, step, _ in after} == {2, 3}
    native = {step: grpo_example.metrics["train", step, "loss"] for step in (1, 2, 3)}
    assert losses == pytest.approx(native, rel=1e-4)
    assert before["train", 2, "loss"] == pytest.approx(after["train", 2, "loss"], rel=1e-4)
    errors = [value for (_, _, name), value in (before | after).items() if name == "token_mult_prob_error"]
    assert len(errors) == 3
    assert max(errors) < 1.01
    _check_export(checkpoints / "step_3", tmp_path)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((), id="one rank"),
        pytest.param(("tensor_parallel_size=2",), id="two ranks", marks=pytest.mark.long),
        pytest.param(("pipeline_parallel_size=2",), id="two stages", marks=pytest.mark.long),
    ],
)
def test_megatron_generation_samples_with_the_training_layers(
    sizes: tuple[str, ...], start_example: StartExample
) -> None:
    """Without vLLM: Megatron Core samples, other ranks train the same layers, and the log-probabilities agree."""
    overrides = ["grpo.val_at_start=false", "grpo.val_period=0", "checkpointing.enabled=false"]
    overrides += [f"policy.generation.engine.{size}" for size in sizes]
    overrides += ["cluster.ranks_per_node=2"] * bool(sizes)
    run = start_example("run_grpo.py", CONFIG, "grpo.max_num_steps=3", *overrides, "policy.generation.backend=megatron")
    assert run.finish() == 0, run.log()[-3000:]
    metrics = of_training(read_metrics(run.log_dir))
    found = {name: [metrics["train", step, name] for step in (1, 2, 3)] for name in ("token_mult_prob_error", "reward")}
    assert max(found["token_mult_prob_error"]) < 1.0001
    assert 0.2 < min(found["reward"]) <= max(found["reward"]) < 0.7, "the tiny model solves a third of the sums"
    assert len({metrics["train", step, "loss"] for step in (1, 2, 3)}) == 3


def _check_export(step: Path, folder: Path) -> None:
    """Check that the folders of the converter and of the run hold the same model."""
    status, output = run_script(
        folder,
        "converters/convert_megatron_to_hf.py",
        f"--config={step}/config.yaml",
        f"--megatron-ckpt-path={step}/policy/weights",
        "--hf-ckpt-path=hf",
        "--verify",
    )
    assert status == 0, output[-3000:]
    found = re.search(r"log-probabilities: (\S+)", output)
    assert found is not None, output[-3000:]
    assert float(found.group(1)) <= 1e-6
    exported, handed_on = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (folder / "hf", step / "policy/weights/model/consolidated")
    )
    assert exported.keys() == handed_on.keys()
    assert all(torch.equal(tensor, handed_on[name]) for name, tensor in exported.items())
