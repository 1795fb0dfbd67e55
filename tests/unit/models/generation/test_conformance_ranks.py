"""The conformance suite holds for engines of several processes."""

from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
from conformance_of_ranks import check_over_ranks, serve_calls
from engine_of_ranks import EngineOfRanks
from engine_process import LOOK
from generation_helpers import make_mixture, make_model, save_model

from nemo_rl.commands.conformance import PROPERTIES, Case

TENSOR, STAGES, EXPERTS = "tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"
LACKS_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="needs the extra cpu or vllm")
LACKS_MEGATRON = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed (extra mcore)"
)
ENGINES = [
    pytest.param(("vllm", "llama", {TENSOR: 2}), id="vllm tp2", marks=LACKS_VLLM),
    pytest.param(("vllm", "llama", {STAGES: 2}), id="vllm pp2", marks=LACKS_VLLM),
    pytest.param(("vllm", "deepseek_v3", {TENSOR: 2, EXPERTS: 2}), id="vllm ep2", marks=LACKS_VLLM),
    pytest.param(("megatron", "llama", {TENSOR: 2}), id="megatron tp2", marks=LACKS_MEGATRON),
    pytest.param(("megatron", "llama", {STAGES: 2}), id="megatron pp2", marks=LACKS_MEGATRON),
]

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.parametrize("made", ENGINES, indirect=True)]


@pytest.fixture(scope="module")
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineOfRanks, Case]]:
    backend, arch, sizes = request.param
    folder: Path = tmp_path_factory.mktemp("model")
    save_model(folder, make_mixture(arch, 1) if arch == "deepseek_v3" else make_model(arch, False, seed=1))
    with ExitStack() as stack:
        yield EngineOfRanks(folder, stack, (0, 0), backend, **sizes), Case(str(folder))


@pytest.mark.parametrize("name", PROPERTIES)
def test_an_engine_of_two_ranks_holds(made: tuple[EngineOfRanks, Case], tmp_path: Path, name: str) -> None:
    engine, case = made
    address = str(tmp_path / "calls")
    engine.ranks[0].start("engine", LOOK, check_over_ranks, [address], case, name)
    engine.ranks[1].start("engine", LOOK, serve_calls, address)
    try:
        engine.ranks[0].answer(LOOK)
    finally:
        engine.ranks[1].answer(LOOK)
