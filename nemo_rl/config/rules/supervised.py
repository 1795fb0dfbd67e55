"""Check keys of SFT, DPO and reward-model training against each other."""

from collections.abc import Sequence
from itertools import chain

from nemo_rl.config.base.names import FEEDBACK_DATASET_NAMES
from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.rules.data import check_dataset, check_shares, named_entries
from nemo_rl.config.rules.engines import check_device
from nemo_rl.config.rules.models import check_backend, check_trainable
from nemo_rl.config.rules.training import check_lengths, check_shards, check_validation
from nemo_rl.config.schema.algorithms.supervised import DPOConfig, RMConfig, SupervisedConfig, SupervisedDataConfig
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
        check_device(policy, cluster),
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


def check_reward_model(rm: RMConfig, policy: PolicyConfig, data: SupervisedDataConfig) -> Findings:
    """Check that the policy has a head for scores, and that all keys belong to the type of the reward model."""
    head = policy.reward_model_cfg
    if not head.enabled:
        yield "policy.reward_model_cfg.enabled=false, but run_rm.py trains a head for scores. Set it to true."
    yield from _check_keys_of_type(rm, head.reward_model_type)
    if head.reward_model_type == "regression":
        yield from _check_attributes(rm, head.attributes)
    elif head.attributes:
        yield (
            f"policy.reward_model_cfg.attributes={head.attributes} are scores of reward_model_type=regression, not of "
            f"{head.reward_model_type}. Set policy.reward_model_cfg.reward_model_type=regression, or leave them out."
        )
    if head.reward_model_type == "process":
        for key in ("add_bos", "add_eos", "add_generation_prompt"):
            if not getattr(data, key):
                yield (
                    f"data.{key}=false has no meaning with policy.reward_model_cfg.reward_model_type=process, whose "
                    "steps follow the prompt as in generation. Leave it at true."
                )
    for name, entry in named_entries(data):
        if entry.margin_key is not None and head.reward_model_type != "bradley_terry":
            yield (
                f"{name}.margin_key={entry.margin_key} has no meaning with policy.reward_model_cfg.reward_model_type="
                f"{head.reward_model_type}, which learns from single answers. Leave it out."
            )


_KEYS_OF_TYPES: dict[str, tuple[str, ...]] = {
    "bradley_terry": ("margin", "center_rewards_coefficient"),
    "regression": ("attribute_weights", "min_score", "max_score"),
    "process": ("step_separator",),
}
"""Keys of `rm` that only one type of reward model reads."""


def _check_keys_of_type(rm: RMConfig, kind: str) -> Findings:
    neutral = RMConfig.build()
    for owner, keys in _KEYS_OF_TYPES.items():
        for key in keys:
            value = getattr(rm, key)
            if owner != kind and value != getattr(neutral, key):
                yield (
                    f"rm.{key}={value!r} belongs to policy.reward_model_cfg.reward_model_type={owner}, and this run "
                    f"has {kind}. Leave it out."
                )


def _check_attributes(rm: RMConfig, attributes: Sequence[str]) -> Findings:
    """Check the names of scores, their weights and their limits."""
    key = "policy.reward_model_cfg.attributes"
    if not attributes:
        yield (
            f"{key} is empty, but policy.reward_model_cfg.reward_model_type=regression learns a score for each. "
            "Name the scores of the data, for example [helpfulness, correctness]."
        )
    for name in sorted({name for name in attributes if attributes.count(name) > 1}):
        yield f"{key} names {name} twice. Name each score once."
    for name in attributes:
        if _extreme_name(name):
            yield (
                f"{key} names {name}, whose metrics would be taken for a minimum or maximum. Rename the score, without "
                "min or max at its end."
            )
    for name in (name for name in rm.attribute_weights if name not in attributes):
        yield (
            f"rm.attribute_weights.{name} is the weight of no score.{did_you_mean(name, attributes)} Scores in {key}: "
            f"{', '.join(attributes)}."
        )
    if attributes and not any(rm.attribute_weights.get(name, 1.0) for name in attributes):
        yield "rm.attribute_weights has the weight 0 for every score, so nothing is learned. Give one of them a weight."
    if rm.min_score is not None and rm.max_score is not None and rm.min_score >= rm.max_score:
        yield f"rm.min_score={rm.min_score:g} is not less than rm.max_score={rm.max_score:g}. Lower it."


def _extreme_name(name: str) -> bool:
    """Return whether a metric that ends with this name would be reduced as an extreme (`losses.extreme_of`)."""
    return name.rpartition("_")[2] in ("min", "max")


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
