"""Checkpoints of runs with `policy.invariant_gradients` have the same bits for other microbatches and ranks."""

import hashlib
from pathlib import Path

import pytest
from example_runs import StartExample, finished
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 3
RUNS = {
    "grpo": (
        *("run_grpo.py", "grpo_math_cpu.yaml", "policy.generation.backend=hf", "policy.zero_mismatch=true"),
        *("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=8"),
        *("grpo.val_at_start=false", "loss_fn.reference_policy_kl_penalty=0.01"),
    ),
    "sft": ("run_sft.py", "sft_cpu.yaml"),
}
LAYOUTS = {
    "packed": (),
    "padded": ("policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=2"),
    "two ranks": ("cluster.ranks_per_node=2", "policy.sequence_packing.enabled=false"),
}


@pytest.mark.parametrize("algorithm", RUNS)
def test_checkpoints_have_the_same_bits(algorithm: str, start_example: StartExample, tmp_path) -> None:
    script, config, *values = RUNS[algorithm]
    common = (
        *(f"{algorithm}.max_num_steps={STEPS}", f"{algorithm}.val_period=0", f"checkpointing.save_period={STEPS}"),
        *("policy.invariant_gradients=true", "checkpointing.metric_name=null", *values),
    )
    digests = {}
    for name, layout in LAYOUTS.items():
        metrics = finished(start_example, script, config, (*common, *layout), tmp_path / name)
        assert metrics["train", STEPS, "grad_norm"] > 0
        digests[name] = digest(tmp_path / name)
    assert len(set(digests.values())) == 1, digests


def digest(folder: Path) -> str:
    """Return a hash of the weights of the last checkpoint, which ranks may divide among files."""
    files = folder.glob(f"checkpoints/step_{STEPS}/policy/weights/model/*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert tensors
    hashed = hashlib.sha256()
    for name in sorted(tensors):
        hashed.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return hashed.hexdigest()
