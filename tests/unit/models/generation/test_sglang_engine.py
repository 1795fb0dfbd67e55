"""The SGLang engine against a server that speaks SGLang's documented interface."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from generation_helpers import make_model, make_settings, save_model
from sglang_stand_in import Running

from nemo_rl.config.schema.model.sglang import SglangConfig
from nemo_rl.models.generation.conformance import PROPERTIES, Case, NotOffered, check_property
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.sglang.engine import SglangEngine

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


def wait_for(port: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise AssertionError("the stand-in did not start")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[dict[str, Running]]:
    """One for each mode; the one for "abort" reports no versions, as older releases."""
    with Running(str(folder)) as new, Running(str(folder), "--without-versions") as old:
        for server in (new, old):
            wait_for(server.port)
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
