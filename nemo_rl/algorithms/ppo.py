"""Build runs of proximal policy optimisation with a critic (arXiv 1707.06347), and re-export NeMo RL's names.

One step (`runtime.run.train`):

    rollouts ─► log-probabilities ─► values ─► advantages, returns ─► critic's updates ─► policy's updates
                scoring              critic    credit.token_credit   critic              critic.PolicyEpochs

The critic is a second model of the run (section `value`). Rollouts, weight sync, overlap and the loss of the policy are
shared with GRPO. Invariant: advantages and returns of a step are computed from the weights at its start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.credit.token_credit import TokenCredit
from nemo_rl.algorithms.recipe import Recipe, Sampling
from nemo_rl.algorithms.rollout.environments import response_data
from nemo_rl.algorithms.rollout.source import check_source
from nemo_rl.algorithms.runtime.run import Run, Stage, StepBatch, Trainer
from nemo_rl.algorithms.runtime.run import train_with_restarts as ppo_train
from nemo_rl.algorithms.runtime.session import SaveState, Session
from nemo_rl.algorithms.scoring import forward_passes, policy_scoring
from nemo_rl.algorithms.setup.user_parts import NOTHING, UserParts
from nemo_rl.algorithms.start import start_run
from nemo_rl.compat.public_names import public_names
from nemo_rl.config import AsyncPPOConfig, LoggerConfig, PPOConfig, PPOMasterConfig, Role
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.data.model_rows import ROW_INPUTS
from nemo_rl.data.packing import PROMPT_GROUPS
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.rows import rows_per_update
from nemo_rl.experience.trajectory import Outcome
from nemo_rl.losses.loss_function import AnyLossFunction, LossFunction
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.losses.supervised import MseValueLossFn
from nemo_rl.models.policy.batching import count_valid
from nemo_rl.models.policy.interfaces import ScoreOutputSpec, TrainResult, ValueOutputSpec
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.errors import ConfigError, DataError
from nemo_rl.utils.seed import set_seed

_OF_A_CRITIC = (
    "input_ids",
    "input_lengths",
    "token_mask",
    "sample_mask",
    "values",
    "returns",
    PROMPT_GROUPS,
    ROW_INPUTS,
)
_NOT_OF_A_POLICY = ("values", "values_after", "returns")
"""Columns that are not sent to the policy's ranks, because the loss reads only the advantages computed from them."""
_OF_THE_BATCH = ("global_valid_seqs", "global_valid_toks", "num_valid_samples", "num_filtered_tokens")
"""Metrics that count samples or tokens of the batch. They are reported for one epoch, not for the sum of all epochs."""


class Critic(Trainer, Protocol):
    """Interface of a model with a scalar head."""

    def get_values(self, data: BatchedDataDict[Any]) -> BatchedDataDict[ValueOutputSpec]:
        """Return the value of the state before each token."""

    def score(self, data: BatchedDataDict[Any]) -> BatchedDataDict[ScoreOutputSpec]:
        """Return the value of the state after the last token of each row."""


@dataclass(frozen=True)
class ValueInference:
    """Stage that adds the critic's values to a batch (`runtime.run.Stage`)."""

    critic: Critic
    """The critic."""
    continues_truncated: bool = False
    """Whether to compute the value after the last token of truncated answers."""

    name = "value_inference"
    roles = ("value",)

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Write `values [B, T]` float32, where position t has the value of the state before token t.

        With `continues_truncated`, also write `values_after [B]` float32: the value of the state after the last token
        of a truncated sample, and 0 for all other rows. A sample with several conversations gets 0 even if one of its
        answers was cut, because its program has ended.
        """
        tensors = batch.tensors
        tensors["values"] = self.critic.get_values(tensors)["values"]
        if self.continues_truncated:
            truncated = [
                number
                for number, row in enumerate(batch.rows)
                if row.outcome == Outcome.TRUNCATED and row.branch is None
            ]
            tensors["values_after"] = torch.zeros(tensors.size)
            if truncated:
                tensors["values_after"][truncated] = self.critic.score(tensors.select_indices(truncated))["scores"]
        return {}


@dataclass(frozen=True)
class CriticUpdate:
    """Stage that trains the critic on the returns (`runtime.run.Stage`)."""

    critic: Critic
    """The model that is trained."""
    loss_fn: LossFunction
    epochs: int
    """Number of passes over the samples of the step."""
    samples_per_update: int
    """Number of samples of one optimizer update."""

    name = "value_training"
    roles = ("value",)

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Train on the batch and return the metrics of all updates of the step.

        Returns:
            Metrics: `critic/loss`, `critic/grad_norm`, `critic/lr` and `vf_clipfrac`, as means over the updates, and
            the counts `critic/num_updates` and `critic/skipped_updates`.

        Raises:
            DataError: Samples have branches, and their rows do not divide into optimizer updates.
        """
        rows: BatchedDataDict[Any] = BatchedDataDict(
            {name: batch.tensors[name] for name in _OF_A_CRITIC if name in batch.tensors}
        )
        size = rows_per_update(batch.trajectories, self.samples_per_update, "value") or self.samples_per_update
        metrics = train_in_epochs(self.critic, rows, self.loss_fn, size, self.epochs)["metrics"]
        of_critic = ("loss", "grad_norm", "lr", "num_updates", "skipped_updates")
        kept = {f"critic/{name}": metrics[name] for name in of_critic if name in metrics}
        return kept | {name: metrics[name] for name in ("vf_clipfrac",) if name in metrics}


@dataclass(frozen=True)
class PolicyEpochs:
    """Trainer that makes several passes over the samples of a step (`runtime.run.Trainer`)."""

    policy: Trainer
    """The model that is trained."""
    epochs: int
    """Number of passes over the samples of a step."""
    samples_per_update: int
    """Number of rows of one optimizer update, if the caller gives no `gbs`."""
    critic_only_steps: int
    """Number of steps at the start of the run that train only the critic."""
    session: Session

    def train(
        self, data: BatchedDataDict[Any], loss_fn: AnyLossFunction, *, gbs: int | Sequence[int] | None = None
    ) -> TrainResult:
        """Make all policy updates of a step (`runtime.run.Trainer`), or none in steps that train only the critic.

        Values and returns are not sent to the ranks. Metrics count the samples and tokens of one epoch.
        """
        if self.session.step <= self.critic_only_steps:
            return _nothing_trained(data)
        rows: BatchedDataDict[Any] = BatchedDataDict(
            {name: column for name, column in data.items() if name not in _NOT_OF_A_POLICY}
        )
        result = train_in_epochs(self.policy, rows, loss_fn, gbs or self.samples_per_update, self.epochs)
        metrics = result["metrics"]
        counts = {name: metrics[name] / self.epochs for name in _OF_THE_BATCH if name in metrics}
        return TrainResult(
            loss=result["loss"],
            grad_norm=result["grad_norm"],
            metrics=metrics | counts,
            all_mb_metrics=result["all_mb_metrics"],
        )


def train_in_epochs(
    model: Trainer, data: BatchedDataDict[Any], loss_fn: AnyLossFunction, gbs: int | Sequence[int], epochs: int
) -> TrainResult:
    """Train on the rows several times, in the same order each time and in one call of `model.train`.

    Args:
        gbs: Number of rows of each optimizer update, or a list of these numbers for the updates of one pass.

    Raises:
        DataError: The rows do not divide into updates of `gbs` rows. An update never contains rows of two passes.
    """
    if epochs == 1:
        return model.train(data, loss_fn, gbs=gbs)
    if isinstance(gbs, int) and data.size % gbs:
        raise DataError(f"{data.size} rows of a step do not divide into optimizer updates of {gbs} rows each.")
    sizes = gbs if isinstance(gbs, int) else [*gbs] * epochs
    return model.train(BatchedDataDict.from_batches([data] * epochs), loss_fn, gbs=sizes)


def _nothing_trained(data: BatchedDataDict[Any]) -> TrainResult:
    """Return the result of a step that does not train the policy, including the counts of its batch."""
    seqs, toks = count_valid(data)
    metrics = {"global_valid_seqs": seqs, "global_valid_toks": toks}
    return TrainResult(loss=torch.zeros(1), grad_norm=torch.zeros(1), metrics=metrics, all_mb_metrics={})


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
"""Alias for NeMo RL's function name. `ppo.overlap` decides whether sampling and training overlap."""
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
    """Build a PPO run and start its workers, with the arguments of `grpo.setup`. `loss_fn` is the policy's loss."""
    user_parts = UserParts(tokenizer, dataset, val_dataset, environments or {}, loss_fn)
    config = user_parts.checked(master_config, PPOMasterConfig)
    return start_run(config, recipe(config, user_parts), started_at)


def recipe(config: PPOMasterConfig, user_parts: UserParts = NOTHING) -> Recipe:
    """Build the PPO recipe from configuration and user-supplied parts. No process is started.

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

    def trainer(roles: Mapping[str, Policy], session: Session) -> PolicyEpochs:
        size, start = config.policy.train_global_batch_size, ppo.policy_training_start_step
        return PolicyEpochs(roles["policy"], ppo.ppo_epochs, size, start, session)

    data = user_parts.data(
        config, lambda: response_data(tokenizer, config, user_parts.running_environments), sampled=True
    )
    check_source(ppo.rollout_source, "ppo.rollout_source")
    return Recipe(
        tokenizer=tokenizer,
        data=data,
        loss_fn=loss_fn,
        roles=config.models | {"policy": Role(config.policy, keeps_reference=needs_reference)},
        stages=stages,
        trainer=trainer,
        sampling=Sampling(environments=user_parts.running_environments),
    )


def check_vocabulary(config: PPOMasterConfig, tokenizer: TokenizerType) -> None:
    """Check that the critic's tokenizer gives every token the same id as `tokenizer`, the policy's.

    Raises:
        ConfigError: A token has another id in the critic's tokenizer, or that tokenizer cannot be loaded.
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
