"""Programs that call the endpoint from the test's process, and an environment that runs them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_rl.config.schema.agents import AgentEndpointConfig
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.processors import math_hf_data_processor
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EpisodeStart, StepResult
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.rollouts import RolloutKey, RolloutLimits, RolloutRunner
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.models.generation.interfaces import SamplingParams

ROOT = Path(__file__).resolve().parents[4]
TOKENIZERS = ROOT / "tests/assets/tokenizers"

type Program = Callable[[Mapping[str, Any]], Awaitable[float]]


class ProgramEnvironment:
    """Runs a coroutine function with the task of each sample; what it returns is the reward."""

    post_processes_groups = False
    reads_chat = True
    continues_episodes = False
    reads_collections = False

    def __init__(self, program: Program, **section: Any) -> None:
        self.program = program
        self.agent_section = section
        self.call_rewards: dict[str, float] | None = None
        self.keys: list[str] = []

    async def open_episode(self, metadata: Any, seed: int | None = None) -> EpisodeStart[Any]:
        return EpisodeStart(metadata)

    async def step(self, message_log: list[dict[str, Any]], metadata: Any) -> StepResult:
        task = metadata["agent"]
        self.keys.append(task["api_key"])
        rest = {name: value for name, value in metadata.items() if name != "agent"}
        done = {"role": "environment", "content": "done"}
        try:
            reward = await self.program({**task, **rest})
        except Exception as error:  # boundary: as the real environment does
            return StepResult.failed(f"the program raised {type(error).__name__}: {error}", rest)
        if self.call_rewards is not None:
            rest["call_rewards"] = self.call_rewards
        return StepResult(done, rest, reward=reward, terminated=True)

    async def close_episode(self, metadata: Any) -> None:
        pass

    async def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float | int]]:
        return batch, {}


def rows(tokenizer: Any, count: int, longest: int = 4000) -> BatchedDataDict[Any]:
    """Collated prompts of the environment `agent`."""
    spec = TaskDataSpec("agent")
    chats = [
        [{"role": "user", "content": f"{n}*{n}="}, {"role": "assistant", "content": str(n * n)}] for n in range(count)
    ]
    data = [
        math_hf_data_processor({"messages": chat, "task_name": "agent"}, spec, tokenizer, longest, n)
        for n, chat in enumerate(chats)
    ]
    return rl_collate_fn(data)


@contextmanager
def collecting(
    engine: Any,
    environment: ProgramEnvironment,
    tokenizer: Any,
    limits: RolloutLimits | None = None,
    **endpoint: Any,
) -> Iterator[RolloutRunner]:
    """A runner on a loop of its own."""
    limits = limits or RolloutLimits(max_sequence_length=4000, max_turns=1, timeout_s=120.0)
    loop = EventLoopThread()
    config = AgentEndpointConfig.build(**endpoint)
    try:
        yield RolloutRunner(engine, {"agent": environment}, tokenizer, limits, loop, endpoint=config)  # type: ignore[dict-item]
    finally:
        loop.close()


def play(
    engine: Any,
    environment: ProgramEnvironment,
    tokenizer: Any,
    *,
    prompts: int = 1,
    samples: int = 1,
    limits: RolloutLimits | None = None,
    max_new_tokens: int = 200,
    **endpoint: Any,
) -> list[Trajectory]:
    """Play samples and return them."""
    ends = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    sampling = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=ends)
    with collecting(engine, environment, tokenizer, limits, **endpoint) as runner:
        collected = runner.collect(rows(tokenizer, prompts), samples, sampling, RolloutKey(1, "train", 0))
    return collected.trajectories


def in_thread[T](function: Callable[[], T]) -> Awaitable[T]:
    """Run a blocking function next to the event loop."""
    return asyncio.get_running_loop().run_in_executor(None, function)
