"""The SGLang engine against a server that speaks SGLang's documented interface."""

import asyncio
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from generation_helpers import ask, load_weights, make_model, make_settings, save_model
from sglang_stand_in import Running

from nemo_rl.commands.conformance import PROPERTIES, Case, NotOffered, check_property
from nemo_rl.commands.conformance.case import answers_of, start
from nemo_rl.config import REPOSITORY_ROOT, ClusterConfig, PolicyConfig, load_config
from nemo_rl.config.loading.algorithms import ALGORITHMS
from nemo_rl.config.rules.engines import check_engines
from nemo_rl.config.schema.model.generation import SglangConfig
from nemo_rl.models.generation.factory import check_engine_model
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.sglang.engine import SglangEngine
from nemo_rl.models.generation.sglang.server import SglangServer, server_arguments
from nemo_rl.utils.errors import ConfigError, WeightSyncError

EXEMPT = {
    "filters": "SGLang reports log-probabilities before top-k and top-p; training refuses both",
    "bad_words": "SGLang has no bad words; a configuration with them is refused",
    "so_far": "it has no responses_so_far",
    "layer_outputs": "its interface has no outputs of layers",
}
MODES = ("retract", "abort")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, make_model("qwen2", True, seed=1))
    return folder


def settings_for(folder: Path, port: int | None, mode: str = "retract", **overrides: Any) -> EngineSettings:
    router = {"use_external_router": port is not None, "sglang_router_ip": "127.0.0.1", "sglang_router_port": port}
    config = SglangConfig.build(sglang_router_config=router, sglang_server_config={"pause_generation_mode": mode})
    return make_settings(folder, "sglang", load_weights=True, engine_kwargs={"sglang_cfg": config}, **overrides)


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[dict[str, Running]]:
    """One for each mode; the one for "abort" reports no versions, as older releases."""
    with Running(str(folder)) as new, Running(str(folder), "--without-versions") as old:
        for server in (new, old):
            server.wait()
        yield {"retract": new, "abort": old}


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engines(folder: Path, servers: dict[str, Running], runner: asyncio.Runner) -> dict[str, SglangEngine]:
    async def make(mode: str) -> SglangEngine:
        return SglangEngine(settings_for(folder, servers[mode].port, mode))

    return {mode: runner.run(make(mode)) for mode in MODES}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_sleep_frees_the_memory_of_a_server_once(
    folder: Path, servers: dict[str, Running], runner: asyncio.Runner
) -> None:
    async def calls_of(**overrides: Any) -> list[str]:
        engine = SglangEngine(settings_for(folder, servers["retract"].port, **overrides))
        before = len(servers["retract"].calls())
        for call in (engine.sleep, engine.sleep, engine.wake_up, engine.wake_up):
            await call()
        return servers["retract"].calls()[before:]

    assert runner.run(calls_of(can_sleep=True)) == ["release_memory_occupation", "resume_memory_occupation"]
    assert runner.run(calls_of()) == []


def test_versions_that_a_server_does_not_report_are_no_guess(
    folder: Path, servers: dict[str, Running], runner: asyncio.Runner
) -> None:
    """With retract the response outlives the update, and this server does not say which weights drew which token."""

    async def updated_on_the_way() -> None:
        engine = SglangEngine(settings_for(folder, servers["abort"].port))
        _, (answer,) = start(engine, [ask([20, 21], max_new_tokens=200)])
        await asyncio.sleep(0.05)
        await load_weights(engine, make_model("qwen2", True, seed=1).named_parameters(), 3)
        await answer

    with pytest.raises(WeightSyncError, match="versions 0 and 3.*pause_generation_mode=abort"):
        runner.run(updated_on_the_way())


@pytest.mark.parametrize("name", PROPERTIES)
@pytest.mark.parametrize("mode", MODES)
def test_the_engine_holds(
    engines: dict[str, SglangEngine],
    servers: dict[str, Running],
    folder: Path,
    runner: asyncio.Runner,
    mode: str,
    name: str,
) -> None:
    case = Case(str(folder), exempt=EXEMPT, kill=servers[mode].kill)
    if name in EXEMPT:
        with pytest.raises(NotOffered):
            runner.run(check_property(engines[mode], case, name))
    else:
        runner.run(check_property(engines[mode], case, name))


PACKAGE = """
from sglang_stand_in import main

if __name__ == "__main__":
    main()
"""


def test_a_server_is_started_and_ended(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: asyncio.Runner
) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/launch_server.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))

    async def answered() -> tuple[str, int]:
        engine = SglangEngine(settings_for(folder, None))
        (result,) = await answers_of(engine, [ask([20, 21])])
        url = engine._server.url
        engine._server.end()
        return url, len(result.token_ids)

    url, count = runner.run(answered())
    assert count == 12
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    (tmp_path / "sglang/launch_server.py").write_text("raise SystemExit(3)")
    with pytest.raises(ConfigError, match="ended with status 3 before it answered.*sglang.launch_server --model-path"):
        SglangServer(settings_for(folder, None))


def test_arguments_of_the_server_are_those_of_the_section_then_those_of_the_library(folder: Path) -> None:
    config = SglangConfig.build(
        tp_size=1, mem_fraction_static=0.4, attention_backend=None, disable_radix_cache=True, cuda_graph_bs=[1, 2]
    )
    settings = replace(settings_for(folder, None), can_sleep=True, precision="bfloat16", load_weights=False)
    line = " ".join(server_arguments(settings, config, 30000))
    for part in (
        *(f"--model-path {folder}", "--port 30000", "--dtype bfloat16", "--context-length 256", "--tp-size 1"),
        *("--mem-fraction-static 0.4", "--disable-radix-cache", "--cuda-graph-bs 1 2", "--load-format dummy"),
        *("--enable-memory-saver", "--enable-weights-cpu-backup", "--enable-deterministic-inference"),
    ):
        assert f"{part} " in f"{line} "
    assert "attention" not in line


def policy_with(folder: Path, **generation: Any) -> PolicyConfig:
    values = {"model_name": str(folder), "max_total_sequence_length": 64, "optimizer": None}
    return PolicyConfig.build(**values, generation={"backend": "sglang", **generation})


def test_a_run_without_the_package_and_without_a_server_is_refused(folder: Path) -> None:
    cluster = ClusterConfig.build(device="cpu")
    with pytest.raises(ConfigError, match=r"not installed.*venvs.generation.packages.*use_external_router=true"):
        check_engine_model(policy_with(folder), cluster)
    external = {"use_external_router": True, "sglang_router_ip": "a", "sglang_router_port": 1}
    check_engine_model(policy_with(folder, sglang_cfg={"sglang_router_config": external}), cluster)


EXTERNAL = {"sglang_router_config": {"use_external_router": True, "sglang_router_ip": "a", "sglang_router_port": 1}}


@pytest.mark.parametrize(
    ("generation", "counts", "words"),
    [
        ({"sglang_cfg": {"sglang_router_config": {"use_external_router": True}}}, [1], "sglang_router_ip and"),
        ({"sglang_cfg": EXTERNAL}, [2], "one engine, and there are 2 ranks"),
        ({"sglang_cfg": {"tp_size": 2}}, [2], "tp_size=2, but the library starts servers of one GPU"),
        ({"sglang_cfg": {"dp_size": 2}}, [2], "dp_size=2"),
        ({"bad_words": ["a"]}, [1], "no bad words"),
        (
            {"sglang_cfg": {"sglang_server_config": {"pause_generation_mode": "in_place"}}},
            [1],
            "in_place keeps.*recompute_kv_cache=false",
        ),
        ({"weight_sync": {"recompute_kv_cache": False}}, [1], "retract computes again.*Use in_place"),
        ({"engine": {"tensor_parallel_size": 2}}, [2], "computes on one device"),
    ],
)
def test_what_servers_cannot_do_is_refused(
    folder: Path, generation: dict[str, Any], counts: list[int], words: str
) -> None:
    section = policy_with(folder, **generation).generation
    assert section is not None
    findings = list(check_engines("policy.generation", section, counts, "keys"))
    assert re.search(words, " ".join(findings)), findings


def test_a_valid_section_is_accepted_with_arguments_of_the_server(folder: Path) -> None:
    section = policy_with(folder, sglang_cfg={**EXTERNAL, "mem_fraction_static": 0.5}).generation
    assert section is not None and list(check_engines("policy.generation", section, [1], "keys")) == []
    assert section.sglang_cfg.server_args == {"mem_fraction_static": 0.5}


def test_the_section_of_nemo_rl_loads(caplog: pytest.LogCaptureFixture) -> None:
    shape = REPOSITORY_ROOT / "tests/unit/config/nemo_rl/grpo.yaml"
    with caplog.at_level("INFO", "nemo_rl.config"):
        config = load_config(shape, ["policy.generation.backend=sglang"], schema=ALGORITHMS["grpo"])
    generation = config.policy.generation
    section = generation.sglang_cfg
    assert generation.engine.max_model_len == section.server_args["context_length"] == 512
    assert (section.tp_size, section.server_args["mem_fraction_static"]) == (1, 0.6)
    assert section.sglang_server_config.sglang_server_concurrency == 1024
    assert "sglang_server_config.num_gpus_per_engine" in caplog.text
    line = " ".join(server_arguments(settings_for(shape.parent, None), section, 1))
    assert "--skip-server-warmup" in line and "None" not in line and "sglang-" not in line
