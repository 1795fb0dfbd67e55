"""An environment that rewards a conversation with the score of a reward model, and ends the episode.

The model has its own ranks, and samples whose turns end at about the same time share a forward pass
(`judges.scoring_ranks`). Invariant: a reward is always the model's score of this conversation. A sample whose score is
not finite, or whose conversation cannot be scored, gets an error.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from nemo_rl.config.schema.judges import RewardModelEnvironmentConfig
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.kits.judges.scoring_ranks import ConversationTokens, JoinedPasses, ScoringRanks
from nemo_rl.models.huggingface.comparison import is_classifier
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.utils.errors import ConfigError, DataError

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import LLMMessageLogType, TokenizerType
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

_MOST_ROWS_OF_A_PASS = 1024


class RewardModelEnvironment(EnvironmentInterface[Any]):
    """An environment around a reward model, as the module docstring describes.

    Args:
        config: the section `env.reward_model`, or its dict.

    Raises:
        ConfigError: the section is disabled, or the model cannot be used.
    """

    reads_chat: ClassVar[bool] = True
    config_class: ClassVar[type | None] = RewardModelEnvironmentConfig

    def __init__(self, config: RewardModelEnvironmentConfig | Mapping[str, Any]) -> None:
        self.cfg = RewardModelEnvironmentConfig.of(config)
        _require_enabled(self.cfg)
        tokenizer = _tokenizer_of_classifier(self.cfg)
        self._tokens = ConversationTokens(tokenizer, self.cfg.max_model_len, self.cfg.too_long, self.cfg.ends_with_turn)
        self._ranks = ScoringRanks(self.cfg, tokenizer)
        self._passes = JoinedPasses(self._ranks.scores, self.cfg.batch_wait_ms / 1000, _MOST_ROWS_OF_A_PASS)

    @classmethod
    def check_section(cls, section: Mapping[str, Any], place: str, tokenizer: "TokenizerType | None" = None) -> None:
        """Check the switch, the model's head and the tokenizer (`EnvironmentInterface.check_section`)."""
        cfg = RewardModelEnvironmentConfig.of(section)
        _require_enabled(cfg)
        if tokenizer is not None:
            _tokenizer_of_classifier(cfg)

    async def step(  # type: ignore[override]  # may be a coroutine function
        self, message_log_batch: list["LLMMessageLogType"], metadata: list[Any]
    ) -> EnvironmentReturn[Any]:
        """Score one conversation (B is 1). Concurrent calls share forward passes.

        Args:
            message_log_batch: B conversations, whose last message is the answer.
            metadata: B items, which are returned unchanged.
        """
        (conversation,) = message_log_batch
        score, error = await self._score(conversation)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}],
            metadata=metadata,
            next_stop_strings=[None],
            rewards=torch.tensor([score], dtype=torch.float64),
            terminateds=torch.ones(1, dtype=torch.bool),
            errors=[error],
        )

    async def _score(self, conversation: "LLMMessageLogType") -> tuple[float, str | None]:
        """Return the score and None, or 0 and the reason why there is no score."""
        try:
            row = self._tokens.of(conversation)
        except DataError as error:
            return 0.0, f"the reward model cannot read the conversation: {error}"
        score = await self._passes.score(row)
        if not math.isfinite(score):
            return 0.0, f"the reward model gave the score {score}"
        return score, None

    def global_post_process_and_metrics(
        self, batch: "BatchedDataDict[Any]"
    ) -> tuple["BatchedDataDict[Any]", dict[str, float | int]]:
        """Return the spread of the scores and the mean size of the forward passes. Rewards do not change."""
        rewards = batch["rewards"].double()
        metrics = {"rows_per_pass": self._passes.num_rows / max(self._passes.num_passes, 1)}
        if len(rewards):
            spread = rewards.std(correction=0)
            metrics |= {"score_mean": float(rewards.mean()), "score_std": float(spread)}
            metrics |= {"score_min": float(rewards.min()), "score_max": float(rewards.max())}
        return batch, metrics

    def shutdown(self) -> None:
        """Stop the ranks of the reward model."""
        self._ranks.shutdown()


def _require_enabled(config: RewardModelEnvironmentConfig) -> None:
    if not config.enabled:
        raise ConfigError("env.reward_model.enabled=false, but rows are rewarded by it. Set it to true.")


def _tokenizer_of_classifier(config: RewardModelEnvironmentConfig) -> "TokenizerType":
    """Check that the model has a trained head for scores, and return its tokenizer."""
    policy = config.as_policy()
    _require_classifier(policy.model_name)
    return get_tokenizer(policy.tokenizer, section="env.reward_model")


def _require_classifier(model_name: str) -> None:
    """Refuse a model without a trained head for scores. A language model would get a random head."""
    config = load_model_config(model_name, section="env.reward_model")
    if not is_classifier(config):
        raise ConfigError(
            f"env.reward_model: {model_name} is {' '.join(config.architectures or ['no known model'])}, not a sequence "
            "classifier, and has no trained head for scores. Name a reward model, or a checkpoint of run_rm.py with "
            "env.reward_model.checkpoint_path."
        )
