"""Sections and rows for the calculator servers of the examples, which stand in for NeMo Gym."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl.agents.nemo_gym import NemoGym
from nemo_rl.environments.interfaces import StepResult, split_return

EXAMPLE = Path(__file__).resolve().parents[4] / "examples/nemo_gym"
KEY = "sk-secret-0815"


def section(folder: Path, **changes: Any) -> dict[str, Any]:
    """The section of servers whose processes have the folder among their arguments."""
    paths = folder / "servers.yaml"
    paths.write_text((EXAMPLE / "calculator_servers.yaml").read_text())
    command = [sys.executable, str(EXAMPLE / "calculator_servers.py")]
    limits = {"start_timeout_s": 60.0, "timeout_s": 20.0, "step_timeout_s": 100.0}
    return {"config_paths": [str(paths)], "command": command, "log_dir": str(folder / "logs"), **limits, **changes}


def row(text: Any = "4", expected: str | None = "4", agent: str = "calculator_agent", **more: Any) -> dict[str, Any]:
    """A row whose answer is its own text, see `FakeEndpoint`."""
    given: dict[str, Any] = {"agent_ref": {"type": "responses_api_agents", "name": agent}, **more}
    given["responses_create_params"] = {"input": [{"role": "user", "content": text}]}
    return given if expected is None else {**given, "expected_answer": expected}


def metadata(url: str, gym_row: Mapping[str, Any]) -> dict[str, Any]:
    agent = {"base_url": url, "api_key": KEY, "model": "policy", "messages": [], "tools": None, "seed": 7}
    agent["start_secret"] = "secret"
    return {"gym_row": dict(gym_row), "agent": agent}


def played(url: str, cfg: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[StepResult]:
    """Play rows at the same time; check that no key is returned."""

    async def play() -> list[StepResult]:
        environment = NemoGym(dict(cfg))
        try:
            outcomes = await asyncio.gather(*(environment.step([[]], [metadata(url, each)], True) for each in rows))
        finally:
            await environment.shutdown()
        return [split_return(outcome, 1, "NemoGym")[0] for outcome in outcomes]

    results = asyncio.run(play())
    assert all(KEY not in repr(result) and (result.reward is None) == (result.error is not None) for result in results)
    return results
