"""The user-written engine of `adding-things.md` runs in real actors, named by its path."""

import asyncio
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from generation_helpers import make_model, save_model
from local_policy import LocalPolicy

from nemo_rl.algorithms.rollout.refit import Refitter
from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.models.generation.factory import check_engine_model, engine_settings, make_engines
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, SamplingParams
from nemo_rl.models.generation.registry import ENGINES
from nemo_rl.utils.errors import ConfigError
from nemo_rl.weight_sync.transport import TransportSpec

PAGE = Path(__file__).resolve().parents[4] / "docs/development/adding-things.md"
CLUSTER = ClusterConfig(device="cpu", gpus_per_node=0)


def policy_with(backend: str, folder: Path, **engine: object) -> PolicyConfig:
    generation = {"backend": backend, "vllm_cfg": {"max_model_len": 64, **engine}}
    return PolicyConfig.build(
        model_name=str(folder), max_total_sequence_length=64, generation=generation, optimizer=None
    )


@pytest.mark.ray
def test_the_shown_engine_runs_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_ray: Path) -> None:
    (block,) = [
        text for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "SteppedEngine" in text
    ]
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project/my_engine.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    save_model(tmp_path, make_model("qwen2", True, seed=0))
    policy = policy_with("my_project.my_engine.BigramEngine", tmp_path, env_vars={"PYTHONPATH": str(tmp_path)})
    check_engine_model(policy, CLUSTER)
    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    source = torch.nn.ParameterDict({"weight": weight})
    requests = [GenerationRequest([0, start], SamplingParams(0.0, max_new_tokens=6), seed=0) for start in range(4)]
    with ExitStack() as ends:
        loop = EventLoopThread()
        ends.callback(loop.close)
        where = RayVirtualCluster([2], use_gpus=False, cpus_per_bundle=0.5)
        ends.callback(where.shutdown)
        engines = make_engines(engine_settings(policy, CLUSTER, 0, load_weights=False), where, CLUSTER)
        ends.callback(engines.shutdown)
        Refitter(LocalPolicy(source), engines, TransportSpec("shared_memory", run_id="test"), 60.0).ensure_fresh()

        async def generate_all() -> list[GenerationResult]:
            return list(await asyncio.gather(*(engines.generate(request) for request in requests)))

        results = loop.run(generate_all(), 60, "answers")
    for start, result in enumerate(results):
        tokens = [start]
        for _ in range(6):
            tokens.append(int(weight[tokens[-1]].argmax()))
        expected = [float(weight[a].log_softmax(0)[b]) for a, b in zip(tokens, tokens[1:], strict=False)]
        assert (result.token_ids.tolist(), result.finish_reason, result.weight_versions) == (
            tokens[1:],
            "length",
            [(0, 1)],
        )
        assert result.logprobs == pytest.approx(expected, abs=1e-6)


def test_every_registered_engine_can_be_named(tmp_path: Path) -> None:
    for name in ENGINES:
        assert policy_with(name, tmp_path).generation.backend == name


@pytest.mark.parametrize("path", ["my_project.nothing.Engine", "json.dumps", "json.Nothing"])
def test_a_path_that_leads_nowhere_is_refused_before_anything_starts(tmp_path: Path, path: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"backend='{path}' (cannot be imported|is not a class).*Use one of vllm, hf"
    ):
        check_engine_model(policy_with(path, tmp_path), CLUSTER)
