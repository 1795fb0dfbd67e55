"""A Megatron Core engine of several ranks on the CPU, each in a separate process: tokens, layers, weights, death."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from engine_of_ranks import EngineOfRanks, check_draws, check_layers, greedy_references
from generation_helpers import (
    PROMPTS,
    ask,
    make_mixture,
    save_model,
    spread_out,
    streamed,
    tiny_shape,
)
from tiny_models import TinyArch, make_tiny_model
from transformers import PreTrainedModel

from nemo_rl.weight_sync.verify import check_receipts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed (extra mcore)"),
]

TENSOR, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
EXPERTS = TENSOR | {"expert_parallel_size": 2}


def dense(arch: TinyArch, tied: bool) -> Callable[[int], PreTrainedModel]:
    shape = replace(tiny_shape(tied), num_kv_heads=2)
    return lambda seed: spread_out(make_tiny_model(arch, shape, seed=seed), seed)


def mixture(arch: str) -> Callable[[int], PreTrainedModel]:
    return lambda seed: make_mixture(arch, seed)


CASES = [
    pytest.param(dense("qwen3", tied=True), TENSOR, id="tied over two ranks"),
    pytest.param(dense("qwen3", tied=True), STAGES, id="tied over two stages"),
    pytest.param(dense("llama", tied=False), TENSOR | STAGES, id="ranks and stages", marks=pytest.mark.long),
    pytest.param(mixture("deepseek_v3"), TENSOR, id="latent attention", marks=pytest.mark.long),
    pytest.param(mixture("deepseek_v3"), EXPERTS, id="experts", marks=pytest.mark.long),
    pytest.param(mixture("deepseek_v3"), STAGES, id="stages with experts", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("make", "sizes"), CASES)
def test_ranks_answer_and_load_weights_like_hugging_face(
    make: Callable[[int], PreTrainedModel], sizes: dict[str, int], tmp_path: Path
) -> None:
    save_model(tmp_path, make(0))
    machines = (0,) * (sizes.get("tensor_parallel_size", 1) * sizes.get("pipeline_parallel_size", 1))
    with ExitStack() as stack:
        engine = EngineOfRanks(tmp_path, stack, machines, "megatron", **sizes)
        assert engine.greedy() == greedy_references(make(0))
        for version in (1, 2):
            model = make(version)
            buckets, receipts = engine.sync(streamed(model), version)
            check_receipts(receipts, buckets, version)
            assert engine.greedy() == greedy_references(model)
        check_draws(engine, model)
        check_layers(engine, model)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineOfRanks]:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, dense("qwen3", tied=True)(0))
    with ExitStack() as stack:
        yield EngineOfRanks(folder, stack, (0, 1), "megatron", **STAGES)


def test_each_rank_names_the_tensors_that_it_was_not_sent(stages: EngineOfRanks) -> None:
    tensors = streamed(dense("qwen3", tied=True)(1))
    first, last = "model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"
    _, receipts = stages.sync({name: t for name, t in tensors.items() if name not in (first, last)}, 1)
    assert [receipt.unbound for receipt in receipts] == [[first], [last]]


def test_an_aborted_request_frees_the_batch(stages: EngineOfRanks) -> None:
    stages.check_abort()
    assert len(stages.greedy()) == len(PROMPTS)


def test_sleeping_ranks_wake_with_the_same_weights(stages: EngineOfRanks) -> None:
    before = stages.greedy()
    stages.call("sleep")
    stages.call("wake_up")
    assert stages.greedy() == before


def test_the_death_of_one_rank_ends_all(stages: EngineOfRanks) -> None:
    """This is the last test of the module: the engine is gone afterwards."""
    stages.ranks[1].kill()
    stages.ranks[0].start("engine", "submit", [("next", ask(PROMPTS[0]))])
    assert stages.ranks[0].wait_until_gone(20)
