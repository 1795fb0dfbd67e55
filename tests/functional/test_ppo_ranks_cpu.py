"""PPO on several ranks, on both backends, packed and padded: the same first step, and a run resumes on another mesh."""

import importlib.util
import shutil
from pathlib import Path

import pytest
from example_runs import ExampleRuns, Metrics, StartExample, of_training, read_metrics
from ppo_runs import CONFIG, SCRIPT, SMALL

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

ALLOWED = 1e-5
OVERRIDES = (
    *SMALL,
    "ppo.val_period=0",
    # Whitened advantages have a mean of 0, and a loss near 0 has no digits that could be compared.
    "ppo.adv_estimator.normalize_advantages=false",
    # One engine, whatever the number of ranks, so that the tokens are the same.
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.ranks_per_node=1",
)
COMPARED = (
    *("loss", "grad_norm", "critic/loss", "critic/grad_norm", "critic/explained_var", "vf_clipfrac"),
    *("values_mean", "values_min", "values_max", "returns_mean", "advantages/mean", "advantages/min"),
    *("advantages/max", "probs_ratio", "probs_ratio_max", "token_mult_prob_error", "reward", "global_valid_toks"),
)
PADDED = ("policy.sequence_packing.enabled=false",)
TWO_RANKS = ("cluster.ranks_per_node=2",)
TENSOR = tuple(f"{model}.dtensor_cfg.tensor_parallel_size=2" for model in ("policy", "value"))
DIFFERENT = ("policy.dtensor_cfg.tensor_parallel_size=2", "value.dtensor_cfg.context_parallel_size=2")
OWN_DEVICES = (
    *("value.colocated.enabled=false", "value.colocated.resources.ranks_per_node=1"),
    *("policy.train_micro_batch_size=4", "value.train_micro_batch_size=2"),
)


def megatron(model: str, *keys: str) -> tuple[str, ...]:
    """Return overrides that train a model with Megatron Core, as its own optimizer does with the other backend."""
    rate = {"policy": "1.0e-4", "value": "3.0e-4"}[model]
    of_section = (
        *("enabled=true", f"optimizer.lr={rate}", f"optimizer.min_lr={rate}", "optimizer.weight_decay=0.01"),
        *("optimizer.use_precision_aware_optimizer=false", "scheduler.lr_warmup_iters=0"),
        *(f"scheduler.lr_warmup_init={rate}", "apply_rope_fusion=false", "bias_activation_fusion=false"),
        *("moe_permute_fusion=false", *keys),
    )
    of_model = ("dtensor_cfg.enabled=false", "optimizer=null", *(f"megatron_cfg.{key}" for key in of_section))
    return tuple(f"{model}.{key}" for key in of_model)


MEGATRON = (*megatron("policy"), *megatron("value"))
MEGATRON_MESHES = (
    *megatron("policy", "tensor_model_parallel_size=2", "sequence_parallel=true"),
    *megatron("value", "pipeline_model_parallel_size=2"),
)
NEEDS_MEGATRON = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)


def differences(found: Metrics, wanted: Metrics, step: int) -> dict[str, float]:
    """Return the relative differences of a step that are larger than allowed, by metric."""
    pairs = {name: (found["train", step, name], wanted["train", step, name]) for name in COMPARED}
    relative = {name: abs(got - want) / max(abs(want), 1e-30) for name, (got, want) in pairs.items() if got != want}
    return {name: difference for name, difference in relative.items() if not difference < ALLOWED}


def run_steps(start: StartExample, folder: Path, steps: int, *overrides: str, logs: str = "logs") -> Metrics:
    """Run to a step, with a checkpoint of each step in the folder, and return the metrics of training."""
    saving = (f"checkpointing.checkpoint_dir={folder}", "checkpointing.save_period=1", "checkpointing.keep_top_k=null")
    run = start(SCRIPT, CONFIG, *OVERRIDES, *saving, f"ppo.max_num_steps={steps}", *overrides, logs=logs)
    assert run.finish() == 0, run.log()[-3000:]
    return of_training(read_metrics(run.log_dir))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Metrics, Path]:
    """Return the metrics and the checkpoints of three steps of one packed rank for each model."""
    folder = tmp_path_factory.mktemp("one-rank")
    runs = ExampleRuns(folder)
    try:
        metrics = run_steps(runs.start, folder / "checkpoints", 3)
    finally:
        runs.close()
    assert metrics["train", 1, "num_updates"] == metrics["train", 1, "critic/num_updates"] == 4
    assert all(abs(metrics["train", 1, name]) > 1e-2 for name in ("loss", "critic/loss", "grad_norm", "values_max"))
    return metrics, folder / "checkpoints"


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(PADDED, id="padded"),
        pytest.param((*TWO_RANKS, *TENSOR), id="tensor"),
        pytest.param((*TWO_RANKS, *DIFFERENT), id="different meshes"),
        pytest.param((*TWO_RANKS, *OWN_DEVICES, *PADDED), id="data parallel, a critic with its own rank, padded"),
        pytest.param(MEGATRON, id="megatron", marks=NEEDS_MEGATRON),
        pytest.param((*TWO_RANKS, *MEGATRON_MESHES), id="megatron on different meshes", marks=NEEDS_MEGATRON),
        pytest.param((*MEGATRON, *PADDED), id="megatron, padded", marks=NEEDS_MEGATRON),
        pytest.param((*TWO_RANKS, *megatron("value")), id="one model for each backend", marks=NEEDS_MEGATRON),
    ],
)
def test_the_first_step_is_the_same(
    overrides: tuple[str, ...], one_rank: tuple[Metrics, Path], start_example: StartExample, tmp_path: Path
) -> None:
    found = run_steps(start_example, tmp_path / "checkpoints", 1, *overrides, "checkpointing.enabled=false")
    assert differences(found, one_rank[0], 1) == {}


def test_a_run_resumes_on_other_meshes_and_back(
    one_rank: tuple[Metrics, Path], start_example: StartExample, tmp_path: Path
) -> None:
    """From one rank to two with different meshes, and back: the next step is that of the run that goes on."""
    metrics, checkpoints = one_rank
    there, back = tmp_path / "there", tmp_path / "back"
    shutil.copytree(checkpoints / "step_1", there / "step_1")
    on_two = run_steps(start_example, there, 3, *TWO_RANKS, *DIFFERENT, logs="there")
    assert {step for _, step, _ in on_two} == {2, 3}
    assert differences(on_two, metrics, 2) == {}
    shutil.copytree(there / "step_2", back / "step_2")
    on_one = run_steps(start_example, back, 3, logs="back")
    assert {step for _, step, _ in on_one} == {3}
    assert differences(on_one, on_two, 3) == {}
