"""An environment that rewards a conversation with the scores of a reward model, and ends the episode.

The model has its own ranks, and samples whose turns end at about the same time share a forward pass
(`judges.scoring_ranks`). `judges.score_forms` computes rewards from scores. Invariant: a reward always follows from the
model's scores of this conversation. A sample with a score that is not finite, or whose conversation cannot be scored,
gets an error.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from nemo_rl.config.schema.judges import RewardModelEnvironmentConfig
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.kits.judges.score_forms import form_of
from nemo_rl.kits.judges.scoring_ranks import JoinedPasses, ScoringRanks
from nemo_rl.models.huggingface.comparison import is_classifier
from nemo_rl.models.huggingface.load import load_model_config, names_of_scores
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
        names = _names_of_scores(self.cfg)
        self._form = form_of(self.cfg, tokenizer, names)
        self._ranks = ScoringRanks(self.cfg, tokenizer, len(names))
        scores = partial(self._form.scores, self._ranks)
        self._passes = JoinedPasses(scores, self.cfg.batch_wait_ms / 1000, _MOST_ROWS_OF_A_PASS)

    @classmethod
    def check_section(cls, section: Mapping[str, Any], place: str, tokenizer: "TokenizerType | None" = None) -> None:
        """Check the switch, the model's head and the tokenizer (`EnvironmentInterface.check_section`)."""
        cfg = RewardModelEnvironmentConfig.of(section)
        _require_enabled(cfg)
        if tokenizer is not None:
            form_of(cfg, _tokenizer_of_classifier(cfg), _names_of_scores(cfg))

    async def step(  # type: ignore[override]  # may be a coroutine function
        self, message_log_batch: list["LLMMessageLogType"], metadata: list[Any]
    ) -> EnvironmentReturn[Any]:
        """Score one conversation (B is 1). Concurrent calls share forward passes.

        Args:
            message_log_batch: B conversations, whose last message is the answer.
            metadata: B items, which are returned unchanged.
        """
        (conversation,) = message_log_batch
        reward, step_rewards, error = await self._reward(conversation)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}],
            metadata=metadata,
            next_stop_strings=[None],
            rewards={name: _column(value) for name, value in reward.items()}
            if isinstance(reward, dict)
            else _column(reward),
            terminateds=torch.ones(1, dtype=torch.bool),
            errors=[error],
            step_rewards=None if step_rewards is None else [step_rewards],
        )

    async def _reward(
        self, conversation: "LLMMessageLogType"
    ) -> tuple[float | dict[str, float], list[tuple[int, float]] | None, str | None]:
        """Return the reward (or one for each component), those of steps, and None or the reason for no reward."""
        try:
            row = self._form.row_of(conversation)
        except DataError as error:
            return self._form.no_reward, None, f"the reward model cannot read the conversation: {error}"
        score = await self._passes.score(row)
        if not all(map(math.isfinite, score if isinstance(score, list) else [score])):
            return self._form.no_reward, None, f"the reward model gave the score {score}"
        return self._form.reward(score), self._form.step_rewards(conversation, score), None

    def global_post_process_and_metrics(
        self, batch: "BatchedDataDict[Any]"
    ) -> tuple["BatchedDataDict[Any]", dict[str, float | int]]:
        """Return the spread of the scores and the mean size of the forward passes. Rewards do not change."""
        rewards = batch["rewards"].double()
        rewards = rewards.sum(1) if rewards.dim() > 1 else rewards
        metrics = {"rows_per_pass": self._passes.num_rows / max(self._passes.num_passes, 1)}
        if len(rewards):
            spread = rewards.std(correction=0)
            metrics |= {"score_mean": float(rewards.mean()), "score_std": float(spread)}
            metrics |= {"score_min": float(rewards.min()), "score_max": float(rewards.max())}
        return batch, metrics

    def shutdown(self) -> None:
        """Stop the ranks of the reward model."""
        self._ranks.shutdown()


def _column(reward: float) -> torch.Tensor:
    return torch.tensor([reward], dtype=torch.float64)


def _names_of_scores(config: RewardModelEnvironmentConfig) -> list[str]:
    """Return the names of the model's scores.

    Raises:
        ConfigError: the section names another number of scores than the model has.
    """
    found = names_of_scores(load_model_config(config.as_policy().model_name, section="env.reward_model"))
    given = config.reward_model_cfg.attributes
    if given and len(given) != len(found):
        raise ConfigError(
            f"env.reward_model.reward_model_cfg.attributes names {len(given)} scores, but the model has {len(found)}: "
            f"{', '.join(found)}. Leave it out, or name each score."
        )
    return given or found


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
