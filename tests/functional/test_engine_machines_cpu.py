"""GRPO whose only engine is on two Ray nodes of this machine: it learns as on one, and a lost node is survived."""

from collections.abc import Iterator

import pytest
from example_runs import ExampleRuns, Metrics, StartExample, of_training, read_metrics
from ray_nodes import RayNodes, ray_nodes

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 6
RESOURCES = "policy.generation.colocated.resources"
SHAPES = {"tensor": "tensor_parallel_size", "stages": "pipeline_parallel_size"}
COMMON = (
    "policy.generation.colocated.enabled=false",
    "cluster.threads_per_rank=1",
    f"grpo.max_num_steps={STEPS}",
    "grpo.val_period=2",
    "checkpointing.enabled=false",
)
THIRD = "127.0.0.4"


def engine_of_two(shape: str) -> str:
    return f"policy.generation.engine.{SHAPES[shape]}=2"


@pytest.fixture(scope="module", params=list(SHAPES))
def on_one_node(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Metrics]]:
    """The shape of the engine, and the metrics of a run whose engine of that shape is on one machine."""
    runs = ExampleRuns(tmp_path_factory.mktemp("one_node"))
    run = runs.start(
        "run_grpo.py",
        "grpo_math_cpu.yaml",
        *COMMON,
        engine_of_two(request.param),
        "cluster.ranks_per_node=2",
        f"{RESOURCES}.ranks_per_node=2",
        environment={},
    )
    assert run.finish() == 0, run.log()[-3000:]
    yield request.param, of_training(read_metrics(run.log_dir))
    runs.close()


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(8, 8) as nodes:
        yield nodes


def without_times(metrics: Metrics) -> Metrics:
    return {key: value for key, value in metrics.items() if "sync" not in key[2]}


def test_an_engine_on_two_nodes_trains_like_one_on_one_node(
    start_example: StartExample, on_one_node: tuple[str, Metrics], nodes: RayNodes
) -> None:
    shape, expected = on_one_node
    own = ("cluster.num_nodes=2", engine_of_two(shape), f"{RESOURCES}.ranks_per_node=1")
    run = start_example("run_grpo.py", "grpo_math_cpu.yaml", *COMMON, *own, environment={"RAY_ADDRESS": nodes.address})
    assert run.finish() == 0, run.log()[-3000:]
    assert without_times(of_training(read_metrics(run.log_dir))) == without_times(expected)
    assert expected["validation", STEPS, "accuracy"] > expected["validation", 0, "accuracy"]


def test_an_engine_that_loses_a_node_is_replaced(start_example: StartExample, nodes: RayNodes) -> None:
    """The policy is on the first node; the engine's rank on the second keeps its place, the one on the third moves."""
    nodes.add(8)
    own = ("cluster.num_nodes=3", f"{RESOURCES}.num_nodes=2", f"{RESOURCES}.ranks_per_node=1", engine_of_two("tensor"))
    run = start_example("run_grpo.py", "grpo_math_cpu.yaml", *COMMON, *own, environment={"RAY_ADDRESS": nodes.address})
    run.wait_for(f"step 2/{STEPS}", 400)
    nodes.kill(THIRD)
    assert run.finish(300) == 0, run.log()[-3000:]
    assert f"Node {THIRD} (id " in run.log() and "restarting it (1 of " in run.log()
    assert ("train", STEPS, "reward") in read_metrics(run.log_dir)
