"""Define the keys of PPO: `ppo`, `value` (the critic) and `value_loss_fn`.

Invariant: the critic is a second policy section with a scalar head, trained together with the policy.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from nemo_rl.config.base.section import Section, derived
from nemo_rl.config.base.value_types import Amount, AmountOrMinusOne, AmountOrZero, Count, Factor, FactorOrZero
from nemo_rl.config.schema.algorithms.overlap import AsyncGRPOConfig
from nemo_rl.config.schema.algorithms.rollout_training import Epochs, RewardedTrainingConfig
from nemo_rl.config.schema.model.policy import AttributeName, RewardModelConfig, RewardModelType
from nemo_rl.config.schema.second_model import SecondModelConfig

Share = Annotated[float, Field(ge=0, le=1)]


class PPOAdvantageConfig(Section):
    """The formula for the advantage of each token from rewards and values."""

    @classmethod
    def without_effect(cls, values: Mapping[str, Any]) -> Mapping[str, str]:
        """Report each lambda that another key replaces, and the policy's keys if the policy has no lambda."""
        is_raw, alpha = values.get("name") == "raw_reward", values.get("length_adaptive_alpha")
        own_policy, own_value = (values.get(f"gae_lambda_{model}") is not None for model in ("policy", "value"))
        no_lambda = "name=raw_reward has no lambda of the policy"
        told = {}
        if is_raw and alpha:
            told["length_adaptive_alpha"] = no_lambda
        if own_policy and (is_raw or alpha):
            told["gae_lambda_policy"] = no_lambda if is_raw else "length_adaptive_alpha sets the policy's lambda"
        if "gae_lambda" in values and own_value and (own_policy or is_raw or alpha):
            told["gae_lambda"] = "policy and critic have lambdas of their own"
        return {**super().without_effect(values), **told}

    name: Literal["gae", "raw_reward"] = "gae"
    """gae: generalised advantage estimation from the critic's values; raw_reward: the discounted sum of rewards from a
    token on, without the critic's values. The critic is still trained."""
    gae_gamma: Share = 1.0
    """Discount of a reward for each token between it and the credited token."""
    gae_lambda: Share = 0.95
    """Lambda of generalised advantage estimation. With 0, the critic's next value replaces all later tokens. With 1,
    only rewards count."""
    gae_lambda_policy: Share | None = None
    """Lambda of the policy's advantages; null: gae_lambda."""
    gae_lambda_value: Share | None = None
    """Lambda of the returns for the critic's training; null: gae_lambda. VAPO uses 1."""
    length_adaptive_alpha: FactorOrZero = 0.0
    """VAPO: the lambda of the policy's advantages is 1 - 1 / (alpha * tokens of the answer), at least 0, so that the
    reward of a long answer also reaches its first tokens. VAPO uses 0.05. 0: off."""
    normalize_advantages: bool = True
    """Shift and scale the advantages of all tokens of a step that count to mean 0 and deviation 1."""
    bootstrap_truncated: bool = False
    """For an answer that hit a length limit, add the critic's value of the state after the last token, as if the answer
    went on. This costs a forward pass of the critic over these answers. false: the value after the last token is 0."""


class AsyncPPOConfig(AsyncGRPOConfig):
    """NeMo RL's section for overlap, the same as `overlap` with `mode=ahead` and `order=in_order`."""

    ignored: ClassVar[dict[str, str]] = {
        "warmup_generation_lead_steps": "max_trajectory_age_steps is the lead of sampling in all steps; while only the "
        "critic is trained, the policy that samples stays the same",
        "drop_incomplete_targets_on_restore": "overlap.partial_responses says what becomes of unfinished groups",
    }


class PPOConfig(RewardedTrainingConfig):
    """Proximal policy optimisation with a critic: steps, epochs, validation and processing of rewards."""

    max_num_steps: Amount = 100_000
    """Training stops after this many steps."""
    max_num_epochs: Epochs = 100_000
    """Training stops after this many passes over the training data; -1: no limit. With data.train.<i>.weight one pass
    has as many prompts as all data sets together have rows."""
    val_period: AmountOrMinusOne = 20
    """Number of steps between two validations; 0 or -1: only at start or end."""
    ppo_epochs: Count = 4
    """Passes over the samples of a step, by the policy and by the critic; each makes all updates of the step again."""
    policy_training_start_step: AmountOrZero = 0
    """Number of steps at the start in which only the critic is trained."""
    adv_estimator: PPOAdvantageConfig = Field(default_factory=PPOAdvantageConfig)
    """The advantage formula."""
    async_ppo: AsyncPPOConfig | None = Field(default_factory=AsyncPPOConfig)
    """NeMo RL's section for overlap. If it is enabled, it fills in overlap."""


class ValueHeadConfig(RewardModelConfig):
    """The scalar head of the critic."""

    idle: ClassVar[dict[str, str]] = dict.fromkeys(
        ("reward_model_type", "attributes"), "a critic has one output, which is trained on returns"
    )

    enabled: Annotated[bool, AfterValidator(lambda _: True)] = True
    """No effect: a critic always has a scalar head."""
    reward_model_type: RewardModelType = "regression"
    """Not used: the critic's output is the value of a state."""
    attributes: Annotated[list[AttributeName], AfterValidator(lambda _: [])] = Field(default_factory=list)
    """Not used: the critic has one output."""


class ValueConfig(SecondModelConfig):
    """The critic, which predicts future rewards. Unset shared keys follow `policy`."""

    place: ClassVar[str] = "value"

    model_name: str = derived("${policy.model_name}")
    """Hub id or folder of the critic's initial model: the policy's model, or a reward model. A model without a scalar
    head gets a new one."""
    reward_model_cfg: ValueHeadConfig = Field(default_factory=ValueHeadConfig)
    """The scalar head."""


class MseValueLossConfig(Section):
    """The squared difference between the critic's values and the returns."""

    scale: Factor = 1.0
    """Factor of the loss."""
    cliprange: Factor | None = None
    """Largest change of a value in one step that reduces the loss; null: no limit."""
