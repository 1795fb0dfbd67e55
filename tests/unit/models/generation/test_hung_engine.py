"""A vLLM engine whose process is stopped while it has requests is named and replaced; real actors and signals."""

import asyncio
import importlib.util
import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from generation_helpers import PROMPTS, ask, make_model, make_settings, save_model
from processes_for_tests import wait_until_gone

from nemo_rl.config import ClusterConfig
from nemo_rl.config.schema.cluster import TimeoutsConfig
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.models.generation.engine_group import EngineGroup
from nemo_rl.models.generation.factory import make_engines
from nemo_rl.utils.errors import DeadlineExceededError

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
SILENCE_S = 4.0


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    thread = EventLoopThread()
    yield thread
    thread.close()


def engines_on(num_engines: int, folder: Path, silence_s: float) -> tuple[EngineGroup, RayVirtualCluster]:
    save_model(folder, make_model("qwen2", False, seed=0))
    timeouts = TimeoutsConfig(engine_silence_s=silence_s)
    cluster = ClusterConfig(device="cpu", gpus_per_node=0, max_actor_restarts=2, timeouts=timeouts)
    where = RayVirtualCluster([num_engines], use_gpus=False, cpus_per_bundle=0.5)
    settings = make_settings(folder, "vllm", load_weights=True, env_vars={"OMP_NUM_THREADS": "1"})
    return make_engines(settings, where, cluster), where


def answers(engines: EngineGroup, loop: EventLoopThread, timeout_s: float = 120) -> list[list[int]]:
    """Greedy answers to all prompts."""

    async def ask_all() -> list[list[int]]:
        results = await asyncio.gather(*(engines.generate(ask(prompt, temperature=0.0)) for prompt in PROMPTS))
        return [result.token_ids.tolist() for result in results]

    return loop.run(ask_all(), timeout_s, "answers")


@pytest.mark.parametrize("num_engines", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_stopped_engine_is_replaced(
    num_engines: int, tmp_path: Path, local_ray: Path, loop: EventLoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="nemo_rl")
    engines, where = engines_on(num_engines, tmp_path, SILENCE_S)
    try:
        expected = answers(engines, loop)
        pid = engines.workers.worker_metadata[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        assert answers(engines, loop) == expected
        assert engines.num_restarts == 1
        assert wait_until_gone([pid]) == [], "the process that hung is killed"
        text = caplog.text
        assert f"Generation engine 0 hangs. Worker vllm_engine-0-0 (rank 0, node 127.0.0.1, pid {pid})" in text
        assert "its process is stopped (SIGSTOP)" in text
        assert re.search(
            rf"{len(PROMPTS) if num_engines == 1 else 3} requests open \(prompts of 1 to \d+ tokens\)", text
        )
        assert time.monotonic() - started < 90
    finally:
        engines.shutdown()
        where.shutdown()


def test_a_timeout_names_the_engine_that_did_not_answer(tmp_path: Path, local_ray: Path, loop: EventLoopThread) -> None:
    engines, where = engines_on(1, tmp_path, 600.0)
    try:
        pid = engines.workers.worker_metadata[0]["pid"]
        os.kill(pid, signal.SIGSTOP)

        async def ask_one() -> None:
            await engines.generate(ask(PROMPTS[0]))

        items = loop.stream(lambda hand_over: ask_one(), 3.0, "the rollouts", engines.describe_open)
        with pytest.raises(DeadlineExceededError, match=rf"Generation engine 0 has 1 requests open: .*pid {pid}"):
            next(items)
        started = time.monotonic()
        engines.shutdown()
        assert time.monotonic() - started < 60, "the engine would be silent for minutes"
        assert wait_until_gone([pid]) == [], "a stopped process is killed at the end"
    finally:
        engines.shutdown()
        where.shutdown()
