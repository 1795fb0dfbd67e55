"""Run programs that a model writes in a sandbox, answer with their output, and grade them with tests.

A turn is one of three:

    has <code>, and no tests or more turns to come   the code runs, its output is the observation
    is the last one and has tests                    its program is graded, the reward is the share of tests passed
    has neither code nor tests                       the episode ends with a reward of 0

Invariant: rewards always come from tests that ran. A program that could not run in the sandbox is its sample's error.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired, TypedDict

import torch

from nemo_rl.config.schema.env import CodeEnvironmentConfig
from nemo_rl.data.messages.content import content_text
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.metrics import calculate_pass_rate_per_prompt
from nemo_rl.kits.code.blocks import code_to_run, final_code
from nemo_rl.kits.code.grading import SolutionGrader, SolutionVerdict, parse_tests
from nemo_rl.kits.code.interpreter import came_to_end, limits_of, observation_of, program_of
from nemo_rl.sandbox import End, Sandbox
from nemo_rl.utils.errors import NemoRLError

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import LLMMessageLogType, TokenizerType
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

CodeEnvConfig = CodeEnvironmentConfig
"""Name of this section's class in NeMo RL."""


class CodeEnvMetadata(TypedDict):
    """Metadata of a sample."""

    ground_truth: NotRequired[str]
    """Tests as JSON (the format of `nemo_rl.kits.code.grading`). Without tests nothing is graded."""
    context: NotRequired[dict[str, Any]]
    """Variables that exist before the first block of code runs. Their values are plain data."""
    working_dir: NotRequired[str | None]
    """Folder whose files are copied into the scratch folder of each program."""
    blocks: NotRequired[list[str]]
    """Blocks of code that ran in earlier turns, which `step` adds."""
    verdict: NotRequired[tuple[int, int, str]]
    """Number of passed checks, number of all checks, and the reason why the program ended, which grading adds."""


@dataclass(frozen=True)
class _Turn:
    """Result of one turn of one sample."""

    observation: str
    metadata: CodeEnvMetadata
    reward: float = 0.0
    terminated: bool = True
    answer: str | None = None
    error: str | None = None


class CodeEnvironment(EnvironmentInterface[CodeEnvMetadata]):
    """An environment that runs the model's Python code.

    Args:
        cfg: The `env.code` section (or its dict).

    Raises:
        SandboxError: This machine does not support the sandbox mechanism `cfg.sandbox`.
    """

    gives_answers: ClassVar[bool] = True
    config_class: ClassVar[type | None] = CodeEnvironmentConfig

    def __init__(self, cfg: CodeEnvironmentConfig | Mapping[str, Any]) -> None:
        self.cfg = cfg if isinstance(cfg, CodeEnvironmentConfig) else CodeEnvironmentConfig.build(**cfg)
        limits = limits_of(self.cfg, wall_time_s=self.cfg.wall_time_s, cpu_time_s=self.cfg.cpu_time_s)
        self._sandbox = Sandbox(limits, self.cfg.sandbox)
        self._grader = SolutionGrader(self._sandbox)
        self._threads = ThreadPoolExecutor(self.cfg.num_workers, thread_name_prefix="code")

    @classmethod
    def check_section(cls, section: Mapping[str, Any], place: str, tokenizer: "TokenizerType | None" = None) -> None:
        """Check that this machine supports a sandbox (`EnvironmentInterface.check_section`)."""
        Sandbox(mechanism=CodeEnvironmentConfig.of(section).sandbox).close()

    async def step(  # type: ignore[override]  # the interface allows coroutine functions
        self,
        message_log_batch: list["LLMMessageLogType"],
        metadata: list[CodeEnvMetadata],
        return_extracted_answer: bool = False,
    ) -> EnvironmentReturn[CodeEnvMetadata]:
        """Run or grade the code of B turns, up to `num_workers` of them at the same time.

        Args:
            message_log_batch: B conversations; only the last message counts.
            metadata: B items.
            return_extracted_answer: Fill `answers` with the graded programs.
        """
        texts = [content_text(log[-1]["content"]) for log in message_log_batch]
        loop = asyncio.get_running_loop()
        turns = await asyncio.gather(
            *(loop.run_in_executor(self._threads, self._take, *pair) for pair in zip(texts, metadata, strict=True))
        )
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": turn.observation} for turn in turns],
            metadata=[turn.metadata for turn in turns],
            next_stop_strings=[self.cfg.stop_strings] * len(turns),
            rewards=torch.tensor([turn.reward for turn in turns]),
            terminateds=torch.tensor([turn.terminated for turn in turns]),
            answers=[turn.answer for turn in turns] if return_extracted_answer else None,
            errors=[turn.error for turn in turns],
        )

    def global_post_process_and_metrics(
        self, batch: "BatchedDataDict[Any]"
    ) -> tuple["BatchedDataDict[Any]", dict[str, float | int]]:
        """Compute metrics over B rollouts without changing their rewards.

        `accuracy` is the share of samples that pass all tests, and `ended_by_<limit>` of those that exceed this limit.
        """
        verdicts = [item.get("verdict") or (0, 1, str(End.EXITED)) for item in batch["extra_env_info"]]
        right = torch.tensor([passed == total for passed, total, _ in verdicts], dtype=torch.float32)
        ends = [end for _, _, end in verdicts]
        return batch, {
            "accuracy": right.mean().item() if verdicts else 0.0,
            "share_of_tests_passed": sum(passed / total for passed, total, _ in verdicts) / max(len(verdicts), 1),
            "pass@samples_per_prompt": calculate_pass_rate_per_prompt(batch["text"], right),
            "num_problems_in_batch": len(verdicts),
            **{
                f"ended_by_{end.replace(' ', '_')}": ends.count(end) / len(ends)
                for end in (End.WALL_TIME, End.CPU_TIME, End.MEMORY, End.OUTPUT)
                if ends
            },
        }

    def shutdown(self) -> None:
        """Wait for the running programs, at most as long as their limits allow."""
        self._threads.shutdown(cancel_futures=True)

    def _take(self, text: str, metadata: CodeEnvMetadata) -> _Turn:
        block, tests = code_to_run(text), metadata.get("ground_truth")
        take: Callable[[str | None, str, CodeEnvMetadata], _Turn] = self._grade
        if block is not None and (tests is None or not self.cfg.terminate_on_evaluation):
            take = self._run
        elif tests is None:
            return _Turn("Environment: no code found", metadata)
        try:
            return take(block, text, metadata)
        except NemoRLError as error:
            return _Turn("Environment: not graded", metadata, error=str(error))

    def _run(self, block: str | None, text: str, metadata: CodeEnvMetadata) -> _Turn:
        assert block is not None
        blocks = [*metadata.get("blocks", ()), block]
        context, folder = metadata.get("context") or {}, metadata.get("working_dir")
        outcome = self._sandbox.run(program_of(blocks, context, folder, self.cfg.scratch_mb << 20))
        if came_to_end(outcome):
            metadata = {**metadata, "blocks": blocks}
        observation = observation_of(outcome, self.cfg.observation_chars)
        return _Turn(observation, metadata, terminated=self.cfg.terminate_on_evaluation, answer=block)

    def _grade(self, block: str | None, text: str, metadata: CodeEnvMetadata) -> _Turn:
        tests = parse_tests(metadata["ground_truth"])
        solution = final_code(text) or block or next(iter(reversed(metadata.get("blocks", []))), None)
        if solution is None:
            return _Turn("Environment: no code found", metadata)
        verdict = self._grader.grade(solution, tests)
        done: CodeEnvMetadata = {**metadata, "verdict": (verdict.num_passed, verdict.num_checks, str(verdict.end))}
        observation = f"Environment: {verdict.num_passed} of {verdict.num_checks} tests passed"
        return _Turn(observation, done, self._reward(verdict), answer=solution)

    def _reward(self, verdict: SolutionVerdict) -> float:
        return verdict.share if self.cfg.reward == "share" else float(verdict.is_right)
