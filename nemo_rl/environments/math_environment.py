r"""Mathematics and multiple choice with a known answer: one turn, graded against the ground truth.

`MathEnvironment` compares plain numbers in its own process, and sends all other answers to the killable processes of a
`GradingPool`. Invariant: a reward of 1 or 0 always comes from a verifier. A sample whose answer could not be judged has
an error.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired, TypedDict

import torch
from torch import Tensor

from nemo_rl.config.schema.env import MathEnvironmentConfig
from nemo_rl.data.messages.content import content_text
from nemo_rl.environments.grading.grade import Grade, VerifierResult
from nemo_rl.environments.grading.pool import GradingPool
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.metrics import calculate_pass_rate_per_prompt

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import LLMMessageLogType
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

MathEnvConfig = MathEnvironmentConfig
"""Name of this section's class in NeMo RL."""


class MathEnvironmentMetadata(TypedDict):
    """Metadata of a math sample."""

    ground_truth: str
    """Correct answer, without box or dollar signs; a letter for multiple choice."""
    extracted_answer: NotRequired[str | None]
    """Text that grading took as the model's answer."""


class MathEnvironment(EnvironmentInterface[MathEnvironmentMetadata]):
    """An environment that grades the assistant's text against `ground_truth` with 1.0 or 0.0, and ends the episode.

    Args:
        cfg: The `env.math` section (or its dict): `num_workers`, `timeout_s`,
            `verifier_type`, `math_verify_impl`.
    """

    max_concurrent_steps: ClassVar[int] = 16
    gives_answers: ClassVar[bool] = True
    config_class: ClassVar[type | None] = MathEnvironmentConfig
    reward_names: Sequence[str] | None = None
    """Names of the reward components, or None for a single reward."""

    def __init__(self, cfg: MathEnvironmentConfig | Mapping[str, Any]) -> None:
        self.cfg = cfg if isinstance(cfg, MathEnvironmentConfig) else MathEnvironmentConfig.build(**cfg)
        self._pool = GradingPool(self.verifier_name(), self.cfg.num_workers, self.cfg.timeout_s)
        self._pool.warm_up()

    def verifier_name(self) -> str:
        """Return the name of the configured verifier."""
        return self.verifier_of(self.cfg)

    @classmethod
    def verifier_of(cls, cfg: MathEnvironmentConfig) -> str:
        """Return the name of the verifier of a section."""
        if cfg.verifier_type in (None, "math"):
            return cfg.math_verify_impl or "hf_math_verify"
        return cfg.verifier_type

    def step(
        self,
        message_log_batch: list["LLMMessageLogType"],
        metadata: list[MathEnvironmentMetadata],
        return_extracted_answer: bool = False,
    ) -> EnvironmentReturn[MathEnvironmentMetadata]:
        """Grade B conversations, and block until each has a result or an error.

        Args:
            message_log_batch: B conversations; the assistant's messages are joined and graded.
            metadata: B items with `ground_truth`.
            return_extracted_answer: Fill `answers`, and `extracted_answer` in the metadata.
        """
        responses = [_assistant_text(log) for log in message_log_batch]
        truths = [str(item["ground_truth"]) for item in metadata]
        prompts = [_prompt_text(log) for log in message_log_batch]
        grades = self._grade(list(zip(responses, truths, strict=True)), prompts)
        results = [grade.verified for grade in grades]
        answers = None
        if return_extracted_answer:
            answers = [verified.extracted_answer if verified else None for verified in results]
            metadata = [
                {"ground_truth": item["ground_truth"], "extracted_answer": answer}
                for item, answer in zip(metadata, answers, strict=True)
            ]
        return EnvironmentReturn(
            observations=[_observation(verified) for verified in results],
            metadata=[self._after(item, verified) for item, verified in zip(metadata, results, strict=True)],
            next_stop_strings=[None] * len(grades),
            rewards=self._rewards(results),
            terminateds=torch.ones(len(grades), dtype=torch.bool),
            answers=answers,
            errors=[grade.error for grade in grades],
        )

    def global_post_process_and_metrics(
        self, batch: "BatchedDataDict[Any]"
    ) -> tuple["BatchedDataDict[Any]", dict[str, float | int]]:
        """Compute metrics over B rollouts without changing their rewards.

        `reward_shaping.stop_properly_penalty_coef` of the algorithm sets the reward of answers that were cut off.

        Args:
            batch: as in `EnvironmentInterface.global_post_process_and_metrics`; `text` may also be [B, S] token ids.
        """
        correct, is_end = self._correct(batch), batch["is_end"].float()
        lengths = batch["generation_lengths"].float()
        return batch, {
            "accuracy": _mean(correct),
            "pass@samples_per_prompt": calculate_pass_rate_per_prompt(batch["text"], correct == 1),
            "fraction_of_samples_properly_ended": _mean(is_end),
            "num_problems_in_batch": len(is_end),
            "generation_lengths": _mean(lengths),
            "prompt_lengths": _mean(batch["prompt_lengths"].float()),
            "correct_solution_generation_lengths": _mean(lengths[correct == 1]),
        }

    def shutdown(self) -> None:
        """Kill the grading processes."""
        self._pool.close()

    def _grade(self, answers: list[tuple[str, str]], prompts: list[str]) -> list[Grade]:
        """Grade (response, ground truth) pairs."""
        return self._pool.grade_answers(answers, prompts)

    def _after(self, item: MathEnvironmentMetadata, verified: VerifierResult | None) -> MathEnvironmentMetadata:
        """Return the metadata of a graded sample."""
        return item

    def _correct(self, batch: "BatchedDataDict[Any]") -> Tensor:
        """Return [B] float, 1.0 where a sample is correct."""
        rewards = batch["rewards"].float()
        return rewards if rewards.ndim == 1 else rewards[:, 0]

    def _rewards(self, results: list[VerifierResult | None]) -> Tensor | dict[str, Tensor]:
        """Stack rewards, with 0 for a row without a result. The row's error overrides that 0."""
        if self.reward_names is None:
            return _column(results, None)
        return {name: _column(results, name) for name in self.reward_names}


class MathMultiRewardEnvironment(MathEnvironment):
    """A math environment with separate rewards for correctness, an integer answer and the think/answer format."""

    reward_names: Sequence[str] | None = (
        "reward/correctness",
        "reward/integer",
        "reward/format",
    )

    @classmethod
    def verifier_of(cls, cfg: MathEnvironmentConfig) -> str:
        """Return the name of the verifier with three components."""
        return "math_multi_reward"


def _assistant_text(message_log: "LLMMessageLogType") -> str:
    return "".join(content_text(message["content"]) for message in message_log if message["role"] == "assistant")


def _prompt_text(message_log: "LLMMessageLogType") -> str:
    """Return the text before the assistant's first message, which is the rendered chat in rollouts."""
    before = list(takewhile(lambda message: message["role"] != "assistant", message_log))
    content = before[-1]["content"] if before else ""
    return content if isinstance(content, str) else content_text([part for part in content if part["type"] == "text"])


def _column(results: list[VerifierResult | None], name: str | None) -> Tensor:
    return torch.tensor([_component(verified, name) for verified in results], dtype=torch.float64)


def _component(verified: VerifierResult | None, name: str | None) -> float:
    if verified is None:
        return 0.0
    reward = verified.reward
    return float(reward[name] if isinstance(reward, dict) and name is not None else reward)  # type: ignore[arg-type]


def _observation(verified: VerifierResult | None) -> dict[str, str]:
    word = "not graded"
    if verified is not None:
        word = "correct" if verified.is_correct else "incorrect"
    return {"role": "environment", "content": f"Environment: {word}"}


def _mean(values: Tensor) -> float:
    """Return the mean as a Python float, or 0.0 if there are no values."""
    return values.mean().item() if len(values) else 0.0
