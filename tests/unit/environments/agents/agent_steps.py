"""Run steps of the environment `agent` as its actor does."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl.agents.programs.environment import AgentEnvironment
from nemo_rl.environments.interfaces import StepResult, split_return

KEY = "sk-secret-0815"
QUESTION = {"role": "user", "content": "4"}


def agent(url: str, **changes: Any) -> dict[str, Any]:
    given = {"base_url": url, "api_key": KEY, "model": "policy", "messages": [QUESTION], "tools": None, "seed": 7}
    given["start_secret"] = "secret"
    return {**given, **changes}


def played(
    url: str, cfg: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] = ({"ground_truth": "4"},), **changes: Any
) -> list[StepResult]:
    """Run the program of a section for rows at the same time; check that no key and no place of it is returned."""

    async def play() -> list[StepResult]:
        environment = AgentEnvironment(dict(cfg))
        steps = [environment.step([[]], [{**row, "agent": agent(url, **changes)}], True) for row in rows]
        try:
            outcomes = await asyncio.gather(*steps)
        finally:
            await environment.shutdown()
        return [split_return(outcome, 1, "AgentEnvironment")[0] for outcome in outcomes]

    results = asyncio.run(play())
    for result in results:
        assert KEY not in repr(result) and "agent" not in result.metadata and result.terminated
        assert (result.reward is None) == (result.error is not None)
    return results


def processes_with(mark: str) -> list[int]:
    """Return the processes of this machine that have a text among their arguments or environment variables."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            texts = (place / "cmdline").read_bytes() + (place / "environ").read_bytes()
        except OSError:  # it has ended
            continue
        if mark.encode() in texts and int(place.name) != os.getpid():
            found.append(int(place.name))
    return found
