"""The environment `nemo_gym`, whose programs are rollouts of NeMo Gym's agents.

An agent plays a sample, and returns the row of the sample with `response`, `reward` and numbers of the verifier.
"""

import asyncio
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nemo_rl.agents.nemo_gym.servers import GymServers, find_program
from nemo_rl.agents.programs.environment import ProgramEnvironment, check_parsers
from nemo_rl.agents.programs.interfaces import (
    KEY_FIELD,
    AgentError,
    AgentProgram,
    AgentResult,
    AgentTask,
    finite_number,
    too_slow,
)
from nemo_rl.agents.programs.service import TaskPoster, shown
from nemo_rl.config.schema.agents import RESULTS_FILE, NemoGymConfig
from nemo_rl.data.processors import GYM_ROW

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import TokenizerType

_COMPONENTS = "reward_components"


def read_rollout(result: Any, row: Mapping[str, Any]) -> AgentResult:
    """Read the result of a rollout.

    Args:
        result: the value that the agent returned.
        row: the row that the agent got. Numbers of the row are not metrics.

    Raises:
        ValueError: the result is not an object, or has no finite reward.
    """
    if not isinstance(result, Mapping):
        raise ValueError(f"it is a {type(result).__name__}, not an object")
    if result.get("reward") is None:
        raise ValueError("it has no reward")
    texts = list(_texts(result.get("response")))
    components = extract_reward_components(result) or {}
    return AgentResult(
        reward=finite_number(result["reward"], "reward"),
        answer=texts[-1] if texts else None,
        metrics={**_numbers(result, row), **{f"{_COMPONENTS}/{name}": value for name, value in components.items()}},
    )


def extract_reward_components(nemo_gym_result: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the components of a result's reward by name, or None if it has no components.

    Raises:
        ValueError: the components are not a mapping from names to finite numbers.
    """
    given = nemo_gym_result.get(_COMPONENTS)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(f"it has {_COMPONENTS} of type {type(given).__name__}, not a mapping of names to numbers")
    return {str(name): finite_number(value, f"{_COMPONENTS}.{name}") for name, value in given.items()}


def _numbers(result: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of the verifier, without numbers of the row."""
    return {
        str(name): float(value)
        for name, value in result.items()
        if name not in row and name != "reward" and isinstance(value, int | float) and math.isfinite(value)
    }


def _texts(response: Any) -> Iterator[str]:
    """Yield the texts of the answers in a response of the Responses API."""
    items = response.get("output") if isinstance(response, Mapping) else None
    for item in items if isinstance(items, list) else ():
        if isinstance(item, Mapping) and item.get("type") == "message" and item.get("role", "assistant") == "assistant":
            parts = item.get("content")
            for part in parts if isinstance(parts, list) else ():
                if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                    yield part["text"]


_LARGEST_RESULT = 2**26


class GymProgram(AgentProgram):
    """Run rollouts of NeMo Gym.

    Args:
        section: the section `env.nemo_gym`.

    Raises:
        ConfigError: the program that starts the servers does not exist on this machine.
    """

    def __init__(self, section: NemoGymConfig) -> None:
        self._servers = GymServers(section)
        self._poster = TaskPoster(_LARGEST_RESULT)
        self._flag = section.flag_field if section.should_mask_flagged_samples else None
        self._log = Path(section.log_dir, RESULTS_FILE) if section.logs_results else None

    async def run(self, task: AgentTask) -> AgentResult:
        """Run a program. The first rollout starts the servers, which extends its deadline."""
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
        """End the servers that this program started."""
        await self._servers.close()
        await self._poster.close()

    async def _read(self, task: AgentTask, row: Mapping[str, Any], content: bytes) -> AgentResult:
        # Only the key is removed from the text. The servers repeat nothing else but the row's own data.
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
    """Return the request for a rollout, which is the row with the sample's key among the fields for model requests."""
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


class NemoGym(ProgramEnvironment):
    """The environment `nemo_gym`, with agents and resources servers of NeMo Gym.

    It runs in a single actor, because the servers are started only once.

    Args:
        cfg: the `env.nemo_gym` section (or its dict).

    Raises:
        ConfigError: the program that starts the servers does not exist on this machine.
    """

    config_class: ClassVar[type | None] = NemoGymConfig

    def __init__(self, cfg: NemoGymConfig | Mapping[str, Any]) -> None:
        section = NemoGymConfig.of(cfg)
        super().__init__(GymProgram(section), section.timeout_s)

    @classmethod
    def check_section(cls, section: Mapping[str, Any], place: str, tokenizer: "TokenizerType | None" = None) -> None:
        """Check the command of the servers, and the parsers (`EnvironmentInterface.check_section`)."""
        cfg = NemoGymConfig.of(section)
        if cfg.config_paths:
            find_program(cfg)
        if tokenizer is not None:
            check_parsers(cfg, place, tokenizer)
