"""With `policy.zero_mismatch`, an engine with a whole model has the bits of a policy on two tensor-parallel ranks."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import random_model
from parity.ranks import on_ranks, policy_config
from torch import Tensor
from zero_mismatch_child import TEMPERATURE

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.config.rules.engines import check_zero_mismatch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.host.row_invariance import compute_rows_alike
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.generation.vllm.zero_mismatch.check import OWN_TYPES
from nemo_rl.models.huggingface.tensor_plans import rows_divided
from nemo_rl.models.policy.batching import logprob_strategy, shard_batch
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.utils.errors import ConfigError

CHILD = Path(__file__).with_name("zero_mismatch_child.py")
TOOLS = Path(__file__).parents[4] / "tools"
MESHES = ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "sequence_parallel": True})
LAYOUTS = tuple((mesh, packed) for mesh in MESHES for packed in (False, True))
type Layouts = tuple[tuple[dict[str, Any], bool], ...]


def sampled(types: tuple[str, ...], engine: str, into: Path, ranks: int = 2) -> None:
    """Sample in a process with two threads, whose ranks below have one each."""
    subprocess.run(
        [sys.executable, str(CHILD), "--engine", engine, "--trainer-ranks", str(ranks), "--into", str(into), *types],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TOOLS), *sys.path]), "OMP_NUM_THREADS": "2"},
        capture_output=True,
        timeout=900,
        check=True,
    )


def scored(config: PolicyConfig, data: BatchedDataDict[Any]) -> Tensor:
    """Return the log-probabilities of all rows, in the order of `data`."""
    compute_rows_alike()
    layout = ParallelLayout.of(config, dist.get_world_size())
    backend = DTensorBackend(config, torch.device("cpu"), layout, init_reference_model=False)
    worker = PolicyWorker(backend, config, gives_scores=True)
    sharded = shard_batch(data, 1, logprob_strategy(config), shares_prompts=worker.shares_prompts())
    scores = worker.get_logprobs(sharded.data[0], sharded.sizes[0])
    order = torch.tensor([row for rows in sharded.plan.shards[0] for row in rows])
    return torch.empty_like(scores).index_copy_(0, order, scores)


def tokens_with_other_bits(model: Path, dtype: str, layouts: Layouts = LAYOUTS) -> list[int]:
    """Return the number of sampled tokens whose log-probability has other bits on two ranks, by mesh and packing."""
    (prompts, answers, logprobs), _ = torch.load(f"{model}-{dtype}.pt")
    rows = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    data = BatchedDataDict[Any]({"input_ids": ids, "input_lengths": torch.tensor([len(row) for row in rows])})
    found = []
    for mesh, packed in layouts:
        values = {"precision": dtype, "max_total_sequence_length": 128, "zero_mismatch": True}
        values["generation"] = {"backend": "hf", "temperature": TEMPERATURE}
        values["sequence_packing"] = {"enabled": packed, "train_mb_tokens": 256, "logprob_mb_tokens": 256}
        scores = on_ranks(scored, 2, policy_config(str(model), mesh, packed=packed, **values), data)[0]
        ours = [score[len(prompt) : len(row)] for score, prompt, row in zip(scores, prompts, rows, strict=True)]
        assert sum(map(len, ours)) > 100
        found.append(int((torch.cat(ours) != torch.cat(logprobs)).sum()))
    return found


def test_a_whole_model_has_the_bits_of_two_ranks(tmp_path: Path) -> None:
    sampled(("qwen3",), "hf", tmp_path)
    assert tokens_with_other_bits(tmp_path / "qwen3", "float32", LAYOUTS[-1:]) == [0]


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_more_models_have_the_bits_of_two_ranks(engine: str, tmp_path: Path) -> None:
    sampled(OWN_TYPES, engine, tmp_path)
    for model_type in OWN_TYPES:
        for dtype in ("float32", "bfloat16"):
            found = tokens_with_other_bits(tmp_path / model_type, dtype)
            assert found == [0] * len(LAYOUTS), (model_type, dtype, found)


@pytest.mark.long
def test_sums_of_one_rank_have_other_bits(tmp_path: Path) -> None:
    sampled(("llama",), "hf", tmp_path, ranks=1)
    assert min(tokens_with_other_bits(tmp_path / "llama", "float32")) > 10


@pytest.mark.parametrize(
    ("model_type", "part"), [("qwen3_moe", "experts"), ("olmo2", "norm"), ("deepseek_v3", "experts")]
)
def test_models_whose_ranks_add_other_things_are_refused(model_type: str, part: str) -> None:
    with pytest.raises(ConfigError, match=f"has 'model.layers.*{part}.*tensor_parallel_size=1"):
        rows_divided(random_model(model_type))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"tensor_parallel_size": 4}, "Set it to 1 or 2"),
        ({"tensor_parallel_size": 2, "custom_parallel_plan": "a.b"}, "by the model's own plan"),
        ({"context_parallel_size": 2}, "context_parallel_size=2. Set it to 1"),
    ],
)
def test_meshes_with_other_sums_are_refused(mesh: dict[str, Any], message: str) -> None:
    policy = PolicyConfig.build(model_name="m", zero_mismatch=True, dtensor_cfg=mesh, generation={"backend": "hf"})
    found = list(check_zero_mismatch(policy, ClusterConfig.build(device="cpu", gpus_per_node=0)))
    assert len(found) == 1 and message in found[0]


def test_two_ranks_are_accepted() -> None:
    for mesh in MESHES:
        policy = PolicyConfig.build(model_name="m", zero_mismatch=True, dtensor_cfg=mesh, generation={"backend": "hf"})
        assert not list(check_zero_mismatch(policy, ClusterConfig.build(device="cpu", gpus_per_node=0)))
