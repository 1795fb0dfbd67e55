"""Configurations and a replacement for the processes of an evaluation."""

import asyncio
from pathlib import Path
from typing import Any

from nemo_rl.config import load_config
from nemo_rl.config.runs.eval import EvalMasterConfig
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EpisodeStart, StepResult
from nemo_rl.evals.evaluator import Sampler
from nemo_rl.evals.prompts import EvalPrompts
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.rollouts import RolloutLimits, RolloutRunner
from nemo_rl.models.generation.factory import engine_settings, sampling_params
from nemo_rl.models.generation.hf import HfEngine
from nemo_rl.models.generation.interfaces import GenerationInterface, GenerationRequest, GenerationResult

ROOT = Path(__file__).resolve().parents[3]
CPU_CONFIG = ROOT / "examples/configs/evals/eval_cpu.yaml"


def eval_config(*overrides: str) -> EvalMasterConfig:
    return load_config(CPU_CONFIG, ("eval.save_path=null", *overrides), schema=EvalMasterConfig)


class InProcessEngine(GenerationInterface):
    """The Hugging Face engine without an actor around it; answers one request at a time."""

    def __init__(self, config: EvalMasterConfig) -> None:
        settings = engine_settings(config.policy, config.cluster, 0, load_weights=True)
        self._engine = HfEngine(settings)
        self.weight_version = 0
        self.num_requests = 0
        self._turn = asyncio.Lock()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.num_requests += 1
        async with self._turn:
            return await self._engine.generate(str(self.num_requests), request)

    def shutdown(self) -> None:
        pass


class BoxedNumbers:
    """An environment that compares the boxed number, without processes."""

    post_processes_groups = False
    reads_chat = False
    continues_episodes = True
    agent_section = None

    async def open_episode(self, metadata: Any, seed: int | None = None) -> EpisodeStart[Any]:
        return EpisodeStart(metadata)

    async def close_episode(self, metadata: Any) -> None:
        pass

    async def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float | int]]:
        return batch, {}

    async def step(self, message_log: list[dict[str, Any]], metadata: Any) -> StepResult:
        from nemo_rl.environments.grading.final_answer import last_boxed

        answer = last_boxed(message_log[-1]["content"])
        reward = float(answer == metadata["ground_truth"])
        return StepResult({"role": "environment", "content": ""}, metadata, reward, True, None, answer)


class StoppingRunner:
    """A runner that fails in its n-th collection, like a killed process."""

    def __init__(self, runner: RolloutRunner, stop_at: int) -> None:
        self._runner = runner
        self._left = stop_at

    def collect(self, prompts: BatchedDataDict[Any], *args: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        return self._runner.collect(prompts, *args)


def make_prompts(config: EvalMasterConfig) -> EvalPrompts:
    return EvalPrompts(config.data, get_tokenizer(config.tokenizer))


def make_sampler(config: EvalMasterConfig, loop: EventLoopThread) -> tuple[Sampler, InProcessEngine]:
    tokenizer = get_tokenizer(config.tokenizer)
    engine = InProcessEngine(config)
    limits = RolloutLimits(config.generation.engine.max_model_len, 1, 60.0)
    runner = RolloutRunner(engine, {"math": BoxedNumbers()}, tokenizer, limits, loop)
    return Sampler(runner, sampling_params(config.policy, tokenizer.eos_token_id, validation=False)), engine
