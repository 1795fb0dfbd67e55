"""An environment that asks a language model for the reward of an answer, and ends the episode.

The judge is any OpenAI-compatible endpoint (a service, or your own model under `vllm serve`), or a model on engines
that the environment starts. Invariant: a reward is always a verdict that the judge wrote. If the judge is down, is too
slow or writes no verdict, the sample gets an error.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

import torch

from nemo_rl.config.schema.judges import LLMJudgeConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.kits.judges.endpoint import Endpoint, endpoint_key
from nemo_rl.kits.judges.engines import JudgeEngines, check_engine
from nemo_rl.kits.judges.questions import JudgeError, JudgeMeter, JudgeModel, Questions
from nemo_rl.kits.judges.verdicts import JudgePrompts, quotable_texts, read_reward
from nemo_rl.utils.errors import DataError

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import LLMMessageLogType, Message, TokenizerType
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

logger = logging.getLogger(__name__)


class LLMJudgeEnvironment(EnvironmentInterface[Any]):
    """An environment around a judge, as the module docstring describes.

    Args:
        config: the section `env.llm_judge`, or its dict.
    """

    reads_chat: ClassVar[bool] = True
    config_class: ClassVar[type | None] = LLMJudgeConfig

    def __init__(self, config: LLMJudgeConfig | Mapping[str, Any]) -> None:
        self.cfg = LLMJudgeConfig.of(config)
        self._prompts = JudgePrompts(self.cfg)
        self._model: JudgeModel = JudgeEngines(self.cfg) if self.cfg.engine else Endpoint(self.cfg)
        self._meter = JudgeMeter()
        self._questions = Questions(self.cfg, self._model, self._meter)

    @classmethod
    def check_section(cls, section: Mapping[str, Any], place: str, tokenizer: "TokenizerType | None" = None) -> None:
        """Check the template, and the endpoint's key or the engines."""
        cfg = LLMJudgeConfig.of(section)
        JudgePrompts(cfg)
        if cfg.engine is None:
            endpoint_key(cfg)
            if not urlsplit(str(cfg.base_url)).path.strip("/"):
                logger.warning(
                    "%s.base_url=%s has no path, but most servers have a version there, such as /v1.",
                    place,
                    cfg.base_url,
                )
        else:
            check_engine(cfg)

    async def step(  # type: ignore[override]  # may be a coroutine function
        self, message_log_batch: list["LLMMessageLogType"], metadata: list[Any]
    ) -> EnvironmentReturn[Any]:
        """Judge one answer (B is 1).

        Args:
            message_log_batch: B conversations, whose last message is the answer.
            metadata: B items, which are returned unchanged (`JudgePrompts.of` describes them).
        """
        (conversation,), (item,) = message_log_batch, metadata
        reward, error = await self._judge(conversation, item)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}],
            metadata=metadata,
            next_stop_strings=[None],
            rewards=torch.tensor([reward], dtype=torch.float64),
            terminateds=torch.ones(1, dtype=torch.bool),
            errors=[error],
        )

    async def _judge(self, conversation: "list[Message]", metadata: Any) -> tuple[float, str | None]:
        """Return the reward (the mean over both orders of two answers) and None, or 0 and the reason for it."""
        try:
            prompts = self._prompts.of(conversation, metadata)
            quotable = quotable_texts(conversation, metadata)
            asked = (self._reward(prompt, bool(order), quotable) for order, prompt in enumerate(prompts))
            rewards = await asyncio.gather(*asked)
        except (JudgeError, DataError) as error:
            return 0.0, str(error)
        return sum(rewards) / len(rewards), None

    async def _reward(self, prompt: str, answer_is_b: bool, quotable: Sequence[str]) -> float:
        return await self._questions.reward(
            prompt, lambda text: read_reward(self.cfg, text, answer_is_b, quotable), "b" if answer_is_b else ""
        )

    def global_post_process_and_metrics(
        self, batch: "BatchedDataDict[Any]"
    ) -> tuple["BatchedDataDict[Any]", dict[str, float | int]]:
        """Return the mean reward, and the requests, latency and cost since the last call. Rewards do not change."""
        rewards = batch["rewards"].double()
        mean = {"score_mean": float(rewards.mean())} if len(rewards) else {}
        return batch, self._meter.metrics(self.cfg) | mean

    def shutdown(self) -> None:
        """Stop the judge's engines. Connections to an endpoint stay open until the process ends."""
        self._model.close()
