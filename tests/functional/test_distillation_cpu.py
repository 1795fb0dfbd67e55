"""On-policy distillation end to end on the CPU: it learns, resumes bit for bit, and the teacher may be separate."""

from collections.abc import Iterator

import pytest
from example_runs import ExampleRuns, Metrics, StartExample, finished, killed_and_resumed, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

SCRIPT, CONFIG = "run_distillation.py", "distillation_math_cpu.yaml"
STEPS = 12
OVERRIDES = (
    f"distillation.max_num_steps={STEPS}",
    f"distillation.val_period={STEPS}",
    f"checkpointing.save_period={STEPS // 2}",
)


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metrics]:
    """Return the metrics of a run."""
    folder = tmp_path_factory.mktemp("distillation")
    runs = ExampleRuns(folder)
    yield finished(runs.start, SCRIPT, CONFIG, OVERRIDES, folder)
    runs.close()


@pytest.mark.long
def test_a_killed_run_resumes_bit_for_bit(start_example: StartExample, tmp_path) -> None:
    killed_and_resumed(start_example, SCRIPT, CONFIG, OVERRIDES, tmp_path, steps=STEPS)


def test_the_student_learns_from_the_teacher(distilled: Metrics) -> None:
    assert distilled["validation", STEPS, "accuracy"] > distilled["validation", 0, "accuracy"] + 0.3
    assert distilled["train", STEPS, "loss"] < 0.5 * distilled["train", 1, "loss"]
    assert distilled["train", STEPS, "student_topk_mass"] > 0.99


@pytest.mark.long
def test_a_teacher_on_separate_devices_gives_the_same_steps(distilled: Metrics, start_example: StartExample) -> None:
    """Two teacher ranks and two separate student ranks; the student packs, the teacher does not."""
    run = start_example(
        SCRIPT,
        CONFIG,
        "distillation.max_num_steps=2",
        "distillation.val_at_start=false",
        "checkpointing.enabled=false",
        "cluster.ranks_per_node=2",
        "policy.generation.colocated.enabled=false",
        "teacher.colocated.enabled=false",
        "teacher.colocated.resources.ranks_per_node=2",
        "teacher.sequence_packing.enabled=false",
        "teacher.logprob_batch_size=16",
    )
    run.wait_for("step 1/2")
    run.processes()
    assert run.finish() == 0, run.log()[-3000:]
    assert run.survivors() == []
    metrics = read_metrics(run.log_dir)
    for step in (1, 2):
        assert metrics["train", step, "reward"] == distilled["train", step, "reward"]
        for name in ("loss", "forward_kl", "reverse_kl", "grad_norm"):
            assert metrics["train", step, name] == pytest.approx(distilled["train", step, name], rel=1e-3)
