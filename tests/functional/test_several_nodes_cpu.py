"""GRPO over two Ray nodes on this machine: it learns as on one, and a lost node is named or replaced."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_runs import ExampleRun, ExampleRuns, Metrics, StartExample, of_training, read_metrics
from ray_nodes import RayNodes, ray_nodes
from small_disk import fill, small_disk

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1200)]

FIRST, SECOND = "127.0.0.2", "127.0.0.3"
STEPS = 6
APART = ("policy.generation.colocated.enabled=false", "cluster.threads_per_rank=1")


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metrics]:
    """Run two ranks and two engines without joining a cluster."""
    runs = ExampleRuns(tmp_path_factory.mktemp("one_node"))
    resources = "policy.generation.colocated.resources.ranks_per_node=2"
    run = start(runs.start, {}, STEPS, *APART, "cluster.ranks_per_node=2", resources)
    assert run.finish() == 0, run.log()[-3000:]
    yield of_training(read_metrics(run.log_dir))
    runs.close()


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(8, 8) as nodes:
        yield nodes


def start(start_example: StartExample, environment: dict[str, str], steps: int, *overrides: str) -> ExampleRun:
    return start_example(
        "run_grpo.py",
        "grpo_math_cpu.yaml",
        f"grpo.max_num_steps={steps}",
        "grpo.val_period=2",
        *overrides,
        environment=environment,
    )


def lose(nodes: RayNodes, address: str, run: ExampleRun) -> tuple[int, float]:
    """Kill a node; return the status of the run and the seconds until it ended."""
    nodes.kill(address)
    killed = time.monotonic()
    return run.finish(300), time.monotonic() - killed


def test_two_nodes_train_like_one_and_a_lost_node_ends_the_run(
    start_example: StartExample, one_node: Metrics, nodes: RayNodes, tmp_path: Path
) -> None:
    joined = {"RAY_ADDRESS": nodes.address}
    saved = ("checkpointing.save_period=2", f"checkpointing.checkpoint_dir={tmp_path}/checkpoints")
    saved += ("cluster.max_run_restarts=0",)
    run = start(start_example, joined, 40, "cluster.num_nodes=2", *APART, *saved)
    run.wait_for(f"step {STEPS + 1}/40", 400)
    status, seconds = lose(nodes, SECOND, run)
    assert (status, seconds < 60) == (1, True), run.log()[-3000:]
    assert f"NodeLostError: Node {SECOND} (id " in run.log()
    assert "rank 1)" in run.log().split("It ran ")[-1]
    metrics = of_training(read_metrics(run.log_dir))
    assert one_node["validation", STEPS, "accuracy"] > one_node["validation", 0, "accuracy"]
    timed = {key for key in one_node if "sync" in key[2]}
    assert {k: v for k, v in metrics.items() if k in one_node.keys() - timed} == {
        k: v for k, v in one_node.items() if k not in timed
    }
    assert (tmp_path / f"checkpoints/step_{STEPS}/policy/weights").is_dir()


def test_a_lost_node_with_a_rank_is_survived_where_another_has_room(
    start_example: StartExample, one_node: Metrics, nodes: RayNodes, tmp_path: Path
) -> None:
    saved = ("checkpointing.save_period=2", f"checkpointing.checkpoint_dir={tmp_path}/checkpoints")
    joined = {"RAY_ADDRESS": nodes.address}
    run = start(start_example, joined, STEPS, "cluster.num_nodes=2", *APART, *saved)
    run.wait_for(f"step 4/{STEPS}", 400)
    status, _ = lose(nodes, SECOND, run)
    assert status == 0, run.log()[-3000:]
    assert f"Node {SECOND} (id " in run.log()
    assert "Restart 1 of 3: the ranks of policy are replaced and continue from" in run.log()
    metrics = of_training(read_metrics(run.log_dir))
    timed = {key for key in one_node if "sync" in key[2]}
    assert {k: v for k, v in metrics.items() if k not in timed} == {k: v for k, v in one_node.items() if k not in timed}


def test_engines_on_a_separate_node_move_when_it_is_lost(
    start_example: StartExample, one_node: Metrics, nodes: RayNodes
) -> None:
    own = "policy.generation.colocated.resources.num_nodes=1"
    joined = {"RAY_ADDRESS": nodes.address}
    run = start(start_example, joined, STEPS, "cluster.num_nodes=2", *APART, own, "checkpointing.enabled=false")
    run.wait_for(f"step 2/{STEPS}", 400)
    status, _ = lose(nodes, SECOND, run)
    assert status == 0, run.log()[-3000:]
    assert f"Node {SECOND} (id " in run.log() and "restarting it" in run.log()
    metrics = of_training(read_metrics(run.log_dir))
    rewards = [metrics["train", step, "reward"] for step in range(1, STEPS + 1)]
    assert rewards == [one_node["train", step, "reward"] for step in range(1, STEPS + 1)]


def test_colocated_engines_run_on_both_nodes(start_example: StartExample, one_node: Metrics, nodes: RayNodes) -> None:
    run = start(
        start_example,
        {"RAY_ADDRESS": nodes.address},
        2,
        "cluster.num_nodes=2",
        "cluster.threads_per_rank=1",
        "checkpointing.enabled=false",
    )
    assert run.finish() == 0, run.log()[-3000:]
    metrics = of_training(read_metrics(run.log_dir))
    assert [metrics["train", step, "reward"] for step in (1, 2)] == [one_node["train", s, "reward"] for s in (1, 2)]


def test_runners_on_both_nodes_sample_what_the_driver_samples(
    start_example: StartExample, one_node: Metrics, nodes: RayNodes
) -> None:
    runners = ("cluster.rollout_runners=2", "checkpointing.enabled=false")
    run = start(start_example, {"RAY_ADDRESS": nodes.address}, 4, "cluster.num_nodes=2", *APART, *runners)
    assert run.finish() == 0, run.log()[-3000:]
    metrics = of_training(read_metrics(run.log_dir))
    rewards = [metrics["train", step, "reward"] for step in range(1, 5)]
    assert rewards == [one_node["train", step, "reward"] for step in range(1, 5)]


def test_a_full_disk_loses_only_unsaved_steps(start_example: StartExample, nodes: RayNodes, tmp_path: Path) -> None:
    with small_disk(tmp_path, "90m") as disk:
        checkpoints = disk / "checkpoints"
        saved = (
            "checkpointing.save_period=2",
            f"checkpointing.checkpoint_dir={checkpoints}",
            "grpo.val_at_start=false",
        )
        command = ({"RAY_ADDRESS": nodes.address}, 6, "cluster.num_nodes=2", *APART, *saved)
        run = start(start_example, *command)
        run.wait_for("step 2/6", 400)
        # Half of a checkpoint fits, so that writing starts and fails.
        filling = fill(disk, leave_bytes=6_000_000)
        assert run.finish() == 1, run.log()[-3000:]
        named = re.escape(f"could not be written to {checkpoints}: no space left on device (a checkpoint takes 12.")
        assert re.search(rf"CheckpointError: step_6 {named}.*step_2 is complete and stays\.", run.log())
        assert re.search(rf" E step_4 {named}.* Training continues; the next save, or the one", run.log())
        assert [path.name for path in checkpoints.glob("*step_*")] == ["step_2"]

        filling.unlink()
        resumed = start(start_example, *command)
        assert resumed.finish() == 0, resumed.log()[-3000:]
        assert f"Resuming from {checkpoints}/step_2" in resumed.log()
        assert (checkpoints / "step_6/policy/weights").is_dir()
