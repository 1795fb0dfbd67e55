"""Check keys of SFT, DPO and reward-model training against each other."""

from collections.abc import Sequence
from itertools import chain

from nemo_rl.config.base.names import FEEDBACK_DATASET_NAMES
from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.rules.data import check_dataset, check_shares, named_entries
from nemo_rl.config.rules.models import check_backend, check_trainable
from nemo_rl.config.rules.training import check_lengths, check_shards, check_validation
from nemo_rl.config.schema.algorithms.supervised import DPOConfig, SupervisedConfig
from nemo_rl.config.schema.checkpointing import CheckpointingConfig
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.data import DataConfig
from nemo_rl.config.schema.model.policy import PolicyConfig
from nemo_rl.utils.errors import did_you_mean


def check_supervised(
    section: str,
    algorithm: SupervisedConfig,
    policy: PolicyConfig,
    data: DataConfig,
    cluster: ClusterConfig,
) -> Findings:
    """Check that a supervised run has a trainable policy, divisible batches, and validation data."""
    if algorithm.max_num_steps == 0:
        yield f"{section}.max_num_steps=0 trains nothing. Use -1 for all of the data, or a number of steps."
    if algorithm.val_batches == 0:
        yield f"{section}.val_batches=0 validates on nothing. Use -1 for all of the data, or {section}.val_period=0."
    if policy.generation is not None:
        yield "policy.generation must be null: this run samples no answers. Leave the section out."
    yield from chain(
        check_backend("policy", policy),
        check_trainable(policy),
        check_shards(policy, cluster),
        check_lengths(policy, data),
        check_validation(section, algorithm, data),
    )


def check_datasets(data: DataConfig, known: Sequence[str]) -> Findings:
    """Check that each data entry names a data set of the right kind.

    Args:
        known: built-in names that fit the algorithm.
    """
    if not data.train_entries and not data.has_user_data:
        yield f"data.train is empty. Name a data set, for example data.train.dataset_name={known[0]}, or a file."
    for name, entry in named_entries(data):
        yield from check_dataset(name, entry, known)
    yield from check_shares(data, has_rewards=False)


def check_best_metric(
    checkpointing: CheckpointingConfig, data: DataConfig, reported: Sequence[str] | None = None
) -> Findings:
    """Check that validation reports the metric that ranks checkpoints.

    Args:
        reported: all metrics of a validation. None if they are unknown before they are reported.
    """
    metric = checkpointing.metric_name or ""
    side, _, bare = metric.partition(":")
    sets = [entry.name for entry in data.validation_entries]
    sets += [entry.name for entry in data.train_entries if entry.split_validation_size > 0]
    if not checkpointing.enabled or side != "val" or not sets:
        return
    if reported is not None and bare not in reported and not bare.startswith("validation-"):
        known = [f"val:{name}" for name in reported]
        yield (
            f"checkpointing.metric_name={metric} is not reported by validation.{did_you_mean(metric, known)} There are "
            f"{', '.join(known)}, and val:validation-<data set>_<name>."
        )
        return
    if None in sets:
        return
    if not any(bare.startswith(f"validation-{name}_") for name in sets):
        yield (
            f"checkpointing.metric_name={metric} is not reported: all validation data has names. Choose the set "
            f"that ranks checkpoints, for example checkpointing.metric_name=val:validation-{sets[0]}_{bare}."
        )


def check_language_model(policy: PolicyConfig) -> Findings:
    """Check that the policy predicts tokens."""
    if policy.reward_model_cfg.enabled:
        yield "policy.reward_model_cfg.enabled=true belongs to run_rm.py: this run trains a language model."


def check_reward_model(policy: PolicyConfig) -> Findings:
    """Check that the policy scores sequences."""
    if not policy.reward_model_cfg.enabled:
        yield "policy.reward_model_cfg.enabled=false, but run_rm.py trains a scalar head. Set it to true."


def check_dpo(dpo: DPOConfig) -> Findings:
    """Check that loss options belong to the chosen loss."""
    loss = dpo.preference_loss
    if dpo.preference_loss_weight == 0 and dpo.sft_loss_weight == 0:
        yield "dpo.preference_loss_weight=0 and dpo.sft_loss_weight=0 leave no loss. Give one of them a weight."
    if dpo.label_smoothing > 0 and loss not in ("sigmoid", "robust", "rpo"):
        yield (
            f"dpo.label_smoothing={dpo.label_smoothing:g} has no meaning with dpo.preference_loss={loss}. "
            "Set it to 0, or the loss to sigmoid or robust."
        )
    if loss == "robust" and dpo.label_smoothing == 0:
        yield (
            "dpo.preference_loss=robust needs dpo.label_smoothing, the share of wrongly labelled pairs, "
            "for example 0.1."
        )
    if loss in ("rpo", "orpo") and dpo.sft_loss_weight == 0:
        yield (
            f"dpo.preference_loss={loss} is a preference loss plus the likelihood of the chosen answer: "
            "set dpo.sft_loss_weight, for example 1.0."
        )
    if loss == "kto":
        yield from _not_with_kto(dpo)
    elif (dpo.desirable_weight, dpo.undesirable_weight) != (1.0, 1.0):
        yield (
            f"dpo.desirable_weight={dpo.desirable_weight:g} and dpo.undesirable_weight={dpo.undesirable_weight:g} "
            f"belong to dpo.preference_loss=kto, not to {loss}. Leave both at 1."
        )


def _not_with_kto(dpo: DPOConfig) -> Findings:
    """Refuse options without a meaning for KTO, whose loss has one term per answer on sums of log-probabilities."""
    for key, neutral in (
        ("preference_loss_weight", 1.0),
        ("sft_loss_weight", 0.0),
        ("preference_average_log_probs", False),
        ("sft_average_log_probs", False),
    ):
        value = getattr(dpo, key)
        if value != neutral:
            yield (
                f"dpo.{key}={str(value).lower()} has no meaning with dpo.preference_loss=kto. "
                f"Leave it at {str(neutral).lower()}."
            )


def check_pair_data(dpo: DPOConfig, data: DataConfig) -> Findings:
    """Check that labelled answers and margins are used only with losses that support them."""
    for name, entry in named_entries(data):
        if entry.margin_key is not None and dpo.preference_loss in ("ipo", "orpo", "kto"):
            yield (
                f"{name}.margin_key={entry.margin_key} has no meaning with dpo.preference_loss={dpo.preference_loss}. "
                "Leave it out, or choose a loss on the difference of two rewards, such as sigmoid."
            )
        if entry.dataset_name in FEEDBACK_DATASET_NAMES and dpo.preference_loss != "kto":
            yield (
                f"{name}.dataset_name={entry.dataset_name} has single answers; dpo.preference_loss="
                f"{dpo.preference_loss} compares two. Set dpo.preference_loss=kto, or name a data set of pairs."
            )
