"""Build runs of proximal policy optimisation with a critic (arXiv 1707.06347), and re-export NeMo RL's names.

One step (`runtime.run.train`):

    rollouts ─► log-probabilities ─► values ─► advantages, returns ─► critic's updates ─► policy's updates
                scoring              critic    credit.token_credit   critic              critic.PolicyEpochs

The critic is a second model of the run, the section `value`. Everything else is shared with GRPO: rollouts, weight
sync, overlap, the loss of the policy. Invariant: advantages and returns of a step come from the weights at its start.
"""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.credit.token_credit import TokenCredit
from nemo_rl.algorithms.critic import CriticUpdate, PolicyEpochs, ValueInference
from nemo_rl.algorithms.rewarded_source import rewarded_source
from nemo_rl.algorithms.rollout.environments import response_data
from nemo_rl.algorithms.rollout.start import RolloutRecipe, start_run
from nemo_rl.algorithms.runtime.run import Run, Stage
from nemo_rl.algorithms.runtime.run import train_with_restarts as ppo_train
from nemo_rl.algorithms.runtime.session import SaveState
from nemo_rl.algorithms.scoring import forward_passes, policy_scoring
from nemo_rl.algorithms.setup.user_parts import NOTHING, UserParts
from nemo_rl.compat.public_names import public_names
from nemo_rl.config import AsyncPPOConfig, LoggerConfig, PPOConfig, PPOMasterConfig, Role
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.losses.loss_function import LossFunction
from nemo_rl.losses.mse_value import MseValueLossFn
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.seed import set_seed

__all__ = [
    "AsyncPPOConfig",
    "MasterConfig",
    "PPOConfig",
    "PPOLoggerConfig",
    "PPOSaveState",
    "async_ppo_train",
    "ppo_train",
    "recipe",
    "setup",
]

MasterConfig = PPOMasterConfig
PPOLoggerConfig = LoggerConfig
PPOSaveState = SaveState
async_ppo_train = ppo_train
"""NeMo RL's name; `ppo.overlap` decides whether sampling and training overlap."""
__getattr__ = public_names(__name__)


def setup(
    master_config: PPOMasterConfig | Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    dataset: Any = None,
    val_dataset: Any = None,
    *,
    environments: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    started_at: float = 0.0,
) -> Run:
    """Build a PPO run and start its workers; arguments and errors as in `grpo.setup`. `loss_fn` is the policy's."""
    user_parts = UserParts(tokenizer, dataset, val_dataset, environments or {}, loss_fn)
    config = user_parts.checked(master_config, PPOMasterConfig)
    return start_run(config, recipe(config, user_parts), started_at)


def recipe(config: PPOMasterConfig, user_parts: UserParts = NOTHING) -> RolloutRecipe:
    """Build the PPO recipe from the configuration and user-supplied parts; start nothing.

    Raises:
        ConfigError, DataError: the configuration or the data cannot be used.
    """
    ppo = config.ppo
    set_seed(ppo.seed)
    tokenizer = user_parts.tokenizer_of(config.policy)
    check_vocabulary(config, tokenizer)
    loss_fn: LossFunction = user_parts.loss(ClippedPGLossFn(config.loss_fn), config.loss_fn)
    credit = TokenCredit(ppo, config.loss_fn)
    needs_prev, needs_reference = forward_passes(config, loss_fn, for_credit=credit.needs_logprobs)
    value_loss_fn = MseValueLossFn(config.value_loss_fn)

    def stages(roles: Mapping[str, Policy]) -> list[Stage]:
        policy, critic = roles["policy"], roles["value"]
        return [
            policy_scoring(config, policy, needs_prev, needs_reference),
            ValueInference(critic, ppo.adv_estimator.bootstrap_truncated),
            credit,
            CriticUpdate(critic, value_loss_fn, ppo.ppo_epochs, config.value.train_global_batch_size),
        ]

    def trainer(roles: Mapping[str, Policy], step: Callable[[], int]) -> PolicyEpochs:
        size, start = config.policy.train_global_batch_size, ppo.policy_training_start_step
        return PolicyEpochs(roles["policy"], ppo.ppo_epochs, size, start, step)

    return RolloutRecipe(
        tokenizer=tokenizer,
        data=user_parts.data(config, lambda: response_data(tokenizer, config), sampled=True),
        loss_fn=loss_fn,
        roles=config.models | {"policy": Role(config.policy, keeps_reference=needs_reference)},
        stages=stages,
        source=rewarded_source("ppo", ppo),
        trainer=trainer,
        prompt_factor=ppo.batch_multiplier if ppo.use_dynamic_sampling else 1.0,
        environments=user_parts.running_environments,
    )


def check_vocabulary(config: PPOMasterConfig, tokenizer: TokenizerType) -> None:
    """Check that the critic, which reads the policy's token ids, means the same tokens by them.

    Args:
        config: the run's configuration.
        tokenizer: the policy's.

    Raises:
        ConfigError: a token has another id in the critic's tokenizer, or the tokenizer cannot be loaded.
    """
    value, policy = config.value, config.policy
    if value.model_name == policy.model_name:
        return
    known = get_tokenizer(value.tokenizer, section="value").get_vocab()
    other = [token for token, number in tokenizer.get_vocab().items() if known.get(token) != number]
    if other:
        raise ConfigError(
            f"value.tokenizer.name={value.tokenizer.name!r} gives {len(other)} tokens other ids than "
            f"policy.tokenizer.name={policy.tokenizer.name!r}, for example {other[0]!r}. The critic reads the tokens "
            "of the policy: set value.model_name to a model of the same family, and value.tokenizer.name to its "
            "tokenizer."
        )
