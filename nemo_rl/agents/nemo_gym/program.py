"""Let an agent of NeMo Gym play a sample, and read its reward.

NeMo Gym's servers have one API key for all samples, and send what a row has in `metadata.extra_body` with each request
for an answer. So the sample's key goes there. Invariant: a reward comes from the resources server; everything else is
the error of one sample.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl.agents.nemo_gym.results import read_rollout
from nemo_rl.agents.nemo_gym.servers import GymServers
from nemo_rl.agents.programs.interfaces import KEY_FIELD, AgentError, AgentProgram, AgentTask, too_slow
from nemo_rl.agents.programs.posting import TaskPoster, shown
from nemo_rl.agents.programs.results import AgentResult
from nemo_rl.config.schema.agents import RESULTS_FILE, NemoGymConfig
from nemo_rl.data.processors import GYM_ROW

_LARGEST_RESULT = 2**26


class GymProgram(AgentProgram):
    """Rollouts of NeMo Gym.

    Args:
        section: the section `env.nemo_gym`.

    Raises:
        ConfigError: the program that starts the servers does not exist here.
    """

    def __init__(self, section: NemoGymConfig) -> None:
        self._servers = GymServers(section)
        self._poster = TaskPoster(_LARGEST_RESULT)
        self._flag = section.flag_field if section.should_mask_flagged_samples else None
        self._log = Path(section.log_dir, RESULTS_FILE) if section.logs_results else None

    async def run(self, task: AgentTask) -> AgentResult:
        """See `AgentProgram.run`; the first rollout starts the servers, which does not count against its deadline."""
        row = task.row.get(GYM_ROW)
        if row is None:
            raise AgentError("the row is none of NeMo Gym; use dataset_name: NemoGymDataset")
        agent = row["agent_ref"]["name"]
        url = f"{await self._servers.agent_url(agent, task.base_url, task.model)}/run"
        try:
            async with asyncio.timeout(task.timeout_s):
                content = await self._poster.post(task, url, _body(row, task.api_key))
        except TimeoutError:
            raise too_slow(task, "env.nemo_gym.timeout_s") from None
        return await self._read(task, row, content)

    async def shutdown(self) -> None:
        """End the servers that were started here."""
        await self._servers.close()
        await self._poster.close()

    async def _read(self, task: AgentTask, row: Mapping[str, Any], content: bytes) -> AgentResult:
        # Only the key is taken out of the text: what else the servers repeat is the row's own.
        text = task.without_key(content.decode(errors="replace"))
        try:
            result = json.loads(text)
            read = read_rollout(result, row)
        except (ValueError, RecursionError) as error:
            raise AgentError(f"the agent sent no result: {error}: {shown(task, content)}") from None
        if self._log is not None:
            await asyncio.to_thread(_append, self._log, json.dumps(result))
        if self._flag is not None and result.get(self._flag) is True:
            raise AgentError(f"NeMo Gym marked the sample as one that shall not train the model ({self._flag})")
        return read


def _body(row: Mapping[str, Any], key: str) -> bytes:
    """Return the request for a rollout: the row, with the sample's key among the fields that requests get.

    Raises:
        AgentError: `metadata.extra_body` of the row is no JSON text of an object.
    """
    parameters = row["responses_create_params"]
    metadata = parameters.get("metadata") or {}
    try:
        extra = json.loads(metadata.get("extra_body") or "{}")
        if not isinstance(extra, dict):
            raise TypeError(f"it is a {type(extra).__name__}")
    except (ValueError, TypeError, AttributeError) as error:
        raise AgentError(f"responses_create_params.metadata.extra_body is no JSON text of an object: {error}") from None
    metadata = {**metadata, "extra_body": json.dumps({**extra, KEY_FIELD: key})}
    return json.dumps({**row, "responses_create_params": {**parameters, "metadata": metadata}}).encode()


def _append(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
