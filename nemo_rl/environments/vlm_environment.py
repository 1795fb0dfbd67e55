"""Questions about images with a known answer: one turn, graded by the weighted rewards that the section names.

The class grades as `MathEnvironment` does. Invariant: a sample is correct if a reward that compares its answer says so.
The form of a response alone never makes it correct.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, override

import torch
from torch import Tensor

from nemo_rl.config.schema.env import MathEnvironmentConfig, VLMEnvironmentConfig
from nemo_rl.environments.grading.grade import Grade, VerifierResult
from nemo_rl.environments.grading.pool import GradingPool
from nemo_rl.environments.grading.vlm_rewards import grade_answers, weighted_rewards
from nemo_rl.environments.math_environment import MathEnvironment, MathEnvironmentMetadata

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import TokenizerType
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

VLMEnvConfig = VLMEnvironmentConfig
"""Name of this section's class in NeMo RL."""


class VLMEnvironmentMetadata(MathEnvironmentMetadata, total=False):
    """Metadata of a graded sample."""

    correct: bool
    """Whether a reward that compares answers found the answer right."""


class VLMEnvironment(MathEnvironment):
    """An environment that adds up weighted rewards of an answer to a question about images, and ends the episode.

    Args:
        cfg: The section `env.<name>` or its dict.
    """

    config_class: ClassVar[type | None] = VLMEnvironmentConfig

    def __init__(self, cfg: VLMEnvironmentConfig | Mapping[str, Any]) -> None:
        section = VLMEnvironmentConfig.of(cfg)
        self.cfg = MathEnvironmentConfig.build(num_workers=section.num_workers, timeout_s=section.timeout_s)
        self._weighted = weighted_rewards(section.reward_functions, "env.vlm")
        names = tuple(dict.fromkeys(weighted.name for weighted in self._weighted))
        self.reward_names: Sequence[str] | None = names if len(names) > 1 else None
        self._pool = GradingPool(self.verifier_name(), section.num_workers, section.timeout_s)

    @override
    @classmethod
    def check_section(cls, section: Mapping[str, Any], place: str, tokenizer: "TokenizerType | None" = None) -> None:
        weighted_rewards(VLMEnvironmentConfig.build(**section).reward_functions, place)

    @override
    def _grade(self, answers: list[tuple[str, str]], prompts: list[str]) -> list[Grade]:
        return grade_answers(self._weighted, answers, self._pool)

    @override
    def _after(self, item: MathEnvironmentMetadata, verified: VerifierResult | None) -> MathEnvironmentMetadata:
        if verified is None:
            return item
        graded: VLMEnvironmentMetadata = {**item, "correct": bool(verified.correct)}
        return graded

    @override
    def _correct(self, batch: "BatchedDataDict[Any]") -> Tensor:
        return torch.tensor([float(info["correct"]) for info in batch["extra_env_info"]])
