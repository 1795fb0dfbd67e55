"""Engines of several ranks: how many there are, and what is refused before anything starts."""

import re
from pathlib import Path

import pytest

from nemo_rl.config import ClusterConfig, EvalMasterConfig, PolicyConfig, load_config, plan_topology
from nemo_rl.config.rules.engines import misplaced
from nemo_rl.models.generation.factory import engine_settings
from nemo_rl.utils.errors import ConfigError

SEPARATE = "policy.generation.colocated.enabled=false"
TENSOR = "policy.generation.engine.tensor_parallel_size"
STAGES = "policy.generation.vllm_cfg.pipeline_parallel_size"
EXPERTS = "policy.generation.engine.expert_parallel_size"


@pytest.mark.parametrize(
    ("resources", "ranks"), [({}, 4), ({"ranks_per_node": 8}, 8)], ids=["one engine", "as many as asked for"]
)
def test_separate_engines_on_cpus_get_their_own_ranks(resources: dict[str, int], ranks: int) -> None:
    engine = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    colocated = {"enabled": False, "resources": resources}
    policy = PolicyConfig.build(model_name="m", generation={"colocated": colocated, "engine": engine})
    topology = plan_topology(ClusterConfig.build(device="cpu", num_nodes=2), policy)
    assert (topology.policy_ranks, topology.generation_ranks) == (2, 2 * ranks)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [f"{TENSOR}=2"],
            r"tensor_parallel_size=2 x pipeline_parallel_size=1 = 2 ranks of an engine are 2 machines of 1 generation "
            r"rank, and there is 1\.\n  1 / 2 = 0\.5\. Nearest value: 2\. Or engines of 1 rank\. "
            r"Keys: cluster\.ranks_per_node, cluster\.num_nodes, or policy\.generation\.colocated\.enabled=false",
        ),
        (
            ["cluster.device=cuda", "cluster.gpus_per_node=8", f"{TENSOR}=3", f"{STAGES}=2"],
            r"3 x pipeline_parallel_size=2 = 6 ranks .*8 generation ranks of a machine.*8 / 6 = 1\.33333\. "
            r"Nearest values: 6, 12\. Or engines of 1, 2, 4, 8 ranks\. Keys: cluster\.gpus_per_node, cluster\.num",
        ),
        (
            ["cluster.device=cuda", "cluster.gpus_per_node=8", SEPARATE, f"{TENSOR}=4",
             "policy.generation.colocated.resources.gpus_per_node=2"],
            r"4 ranks of an engine are 2 machines of 2 generation ranks, and there is 1\..*"
            r"Keys: policy\.generation\.colocated\.resources\.gpus_per_node, .*resources\.num_nodes",
        ),
        (
            [SEPARATE, f"{TENSOR}=2", f"{EXPERTS}=3"],
            r"expert_parallel_size=3 does not go with tensor_parallel_size=2: .* Use a multiple of "
            r"tensor_parallel_size, or 1 .* Nearest values: 2, 4",
        ),
        ([SEPARATE, f"{TENSOR}=2", "policy.generation.backend=hf"], r"backend=hf computes on one device"),
        (
            [SEPARATE, f"{TENSOR}=2", f"{EXPERTS}=4", "policy.generation.backend=megatron"],
            r"backend=megatron divides experts over the ranks of a stage, and .*expert_parallel_size=4 is not "
            r"tensor_parallel_size=2\. Use 2, or 1 to divide each expert",
        ),
        (
            ["+policy.generation.vllm_kwargs={tensor_parallel_size: 2}"],
            r"vllm_kwargs\.tensor_parallel_size decides .* Write policy\.generation\.engine\.tensor_parallel_size",
        ),
        (["+policy.generation.vllm_kwargs={data_parallel_size: 2}"], r"data_parallel_size decides .* Remove it"),
    ],
)  # fmt: skip
def test_bad_engine_sections_are_refused(minimal: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_config(minimal, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [SEPARATE, f"{TENSOR}=2", f"{EXPERTS}=2"],
        [SEPARATE, f"{TENSOR}=2", f"{EXPERTS}=4"],
        [SEPARATE, f"{TENSOR}=2", f"{EXPERTS}=2", "policy.generation.backend=megatron"],
        ["cluster.ranks_per_node=4", f"{TENSOR}=2"],
        ["cluster.device=cuda", "cluster.gpus_per_node=8", f"{TENSOR}=2", f"{STAGES}=4"],
        ["cluster.device=cuda", "cluster.gpus_per_node=8", "cluster.num_nodes=4", f"{TENSOR}=16"],
        ["cluster.num_nodes=2", SEPARATE, "policy.generation.colocated.resources.ranks_per_node=1", f"{STAGES}=2"],
    ],
)
def test_good_engine_sections_load(minimal: Path, overrides: list[str]) -> None:
    load_config(minimal, overrides)


def test_an_evaluation_divides_its_ranks_among_engines() -> None:
    engine = {"tensor_parallel_size": 2}
    config = EvalMasterConfig.build(cluster={"device": "cpu", "ranks_per_node": 3}, generation={"engine": engine})
    (finding,) = [text for text in config.findings() if "ranks of an engine" in text]
    assert finding.startswith("generation.engine.tensor_parallel_size=2") and "Nearest values: 2, 4." in finding


@pytest.mark.parametrize(
    ("tensor", "size", "counts", "message"),
    [
        (2, 2, [4, 6], None),
        (16, 16, [8, 8], None),
        (8, 16, [8] * 4, None),
        (2, 8, [4, 4], None),
        (
            8,
            16,
            [8] * 3,
            r"are 2 machines of 8 .* there are 3\.\n  3 / 2 = 1\.5\..* Or engines of 1, 2, 4, 8, 24 ranks",
        ),
        (
            2,
            6,
            [4] * 3,
            r"more than the 4 .* takes whole machines.*\n  6 / 4 = 1\.5\. Use engines of 1, 2, 4, 12 ranks",
        ),
        (3, 12, [4] * 3, r"tensor-parallel group of 3 .* machines of 4 .* tensor_parallel_size of 1, 2, 4, 12 with"),
        (2, 4, [4, 2], r"do not fit on a machine with 2, .* unequal numbers of ranks: \[4, 2\]"),
        (2, 2, [4, 3], r"do not divide the 3 .*\n  3 / 2 = 1\.5\. Nearest values: 2, 4\. Or engines of 1, 3 ranks"),
    ],
)
def test_engines_stay_on_a_machine_or_take_whole_ones(
    tensor: int, size: int, counts: list[int], message: str | None
) -> None:
    wrong = misplaced(tensor, size, counts)
    if message is None:
        assert wrong is None
    else:
        assert wrong is not None and re.search(message, wrong)


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        ([], 0.6),
        (["policy.generation.colocated.enabled=false"], 0.9),
        (["policy.generation.colocated.enabled=false", "policy.generation.vllm_cfg.gpu_memory_utilization=0.5"], 0.5),
        (["policy.generation.engine.gpu_memory_utilization=0.7"], 0.7),
    ],
)
def test_engines_on_gpus_of_their_own_take_most_of_the_memory(overrides: list[str], share: float) -> None:
    config = load_config("examples/configs/grpo_math_1B.yaml", overrides, check=False)
    generation = config.policy.generation
    assert generation is not None
    assert generation.engine.gpu_memory_utilization == generation.vllm_cfg.gpu_memory_utilization == share
    made = PolicyConfig.build(**config.policy.model_dump(include={"model_name", "generation"}))
    assert engine_settings(made, config.cluster, 0, load_weights=False).gpu_memory_utilization == share
