"""Reward the similarity of an answer with a reference program in one turn, without running anything."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import torch

from nemo_rl.config.schema.env import CodeJaccardEnvironmentConfig
from nemo_rl.data.messages.content import content_text
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.kits.code.blocks import any_code

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import LLMMessageLogType
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

CodeJaccardEnvConfig = CodeJaccardEnvironmentConfig
"""Name of this section's class in NeMo RL."""

_TOKEN = re.compile(r"\w+|[^\w\s]")


class CodeJaccardEnvironmentMetadata(TypedDict):
    """Metadata of a sample."""

    ground_truth: str
    """The reference program."""


def jaccard_similarity(one: str, other: str) -> float:
    r"""Return |A ∩ B| / |A ∪ B| of the sets A and B of words and punctuation characters, or 1.0 for two empty texts.

    Source: Jaccard, "The distribution of the flora in the alpine zone", New Phytologist 11 (1912), 37-50.
    """
    ours, theirs = set(_TOKEN.findall(one)), set(_TOKEN.findall(other))
    return len(ours & theirs) / len(ours | theirs) if ours or theirs else 1.0


class CodeJaccardEnvironment(EnvironmentInterface[CodeJaccardEnvironmentMetadata]):
    """An environment that rewards similarity with a reference program, from 0 to 1, and ends the episode.

    Args:
        cfg: The `env.code_jaccard` section (or its dict).
    """

    gives_answers: ClassVar[bool] = True
    config_class: ClassVar[type | None] = CodeJaccardEnvironmentConfig

    def __init__(self, cfg: CodeJaccardEnvironmentConfig | Mapping[str, Any]) -> None:
        self.cfg = cfg

    def step(
        self,
        message_log_batch: list["LLMMessageLogType"],
        metadata: list[CodeJaccardEnvironmentMetadata],
        return_extracted_answer: bool = False,
    ) -> EnvironmentReturn[CodeJaccardEnvironmentMetadata]:
        """Compare the last message of B conversations with the reference programs.

        The program of a message is its last fenced block, or else its `<code>` block, or else all of it.
        """
        programs = [_program_of(content_text(log[-1]["content"])) for log in message_log_batch]
        truths = [str(item["ground_truth"]) for item in metadata]
        rewards = [jaccard_similarity(*pair) for pair in zip(programs, truths, strict=True)]
        contents = [f"Environment: similarity {reward:.2f}" for reward in rewards]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": content} for content in contents],
            metadata=metadata,
            next_stop_strings=[None] * len(rewards),
            rewards=torch.tensor(rewards),
            terminateds=torch.ones(len(rewards), dtype=torch.bool),
            answers=list(programs) if return_extracted_answer else None,
        )

    def global_post_process_and_metrics(
        self, batch: "BatchedDataDict[Any]"
    ) -> tuple["BatchedDataDict[Any]", dict[str, float | int]]:
        """Compute metrics over B rollouts without changing their rewards."""
        rewards = batch["rewards"].float()
        return batch, {"mean_similarity": rewards.mean().item() if len(rewards) else 0.0}


def _program_of(text: str) -> str:
    return any_code(text) or text
