"""Set up and validate reward models, which learn scores of answers or of their steps.

There are three types (`policy.reward_model_cfg.reward_model_type`): `bradley_terry` learns from pairs of answers,
`regression` from numeric scores of answers, and `process` from labels of their steps (`answer_scores`).

Invariant of `bradley_terry`: `sigmoid(score_a - score_b)` is the predicted probability that answer a is preferred to
answer b. If the model is calibrated, then among pairs with predicted probability p, a is preferred in a share p of
them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.answer_scores import RegressionValidator, ScoreCounts, StepValidator, loss_weights
from nemo_rl.algorithms.recipe import Recipe
from nemo_rl.algorithms.runtime.run import train_with_restarts as rm_train
from nemo_rl.algorithms.setup.user_parts import NOTHING, UserParts
from nemo_rl.algorithms.start import SupervisedSetup
from nemo_rl.algorithms.supervised import collate_by, collate_pairs
from nemo_rl.config import RMConfig, RMMasterConfig
from nemo_rl.data.collate_fn import labelled_steps_collate_fn, scored_collate_fn
from nemo_rl.data.datasets.rows.scored_answers import ScoreColumns
from nemo_rl.data.datasets.setup import setup_preference_data, setup_scored_data, setup_step_data
from nemo_rl.data.tokenizer import ensure_distinct_pad_token
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.preference import CentredMargin, PreferenceLossFn
from nemo_rl.losses.rewards import RegressionLossFn, StepLossFn
from nemo_rl.utils.seed import set_seed

__all__ = ["MasterConfig", "RMConfig", "RMValidator", "calibration_error", "recipe", "rm_train", "setup"]

MasterConfig = RMMasterConfig

CALIBRATION_BINS = 10


def recipe(config: RMMasterConfig, user_parts: UserParts = NOTHING) -> Recipe:
    """Build the recipe of a reward model without starting anything. Arguments and errors are those of `sft.recipe`."""
    set_seed(config.rm.seed)
    tokenizer = user_parts.tokenizer_of(config.policy)
    ensure_distinct_pad_token(tokenizer)
    # # Programs that load the saved model find the end of a padded sequence by this token.
    overrides = {"pad_token_id": tokenizer.pad_token_id} | (config.policy.hf_config_overrides or {})
    config.policy.hf_config_overrides = overrides
    build = {"bradley_terry": _of_pairs, "regression": _of_scores, "process": _of_steps}
    return build[config.head.reward_model_type](config, tokenizer, user_parts)


def _of_pairs(config: RMMasterConfig, tokenizer: PreTrainedTokenizerBase, user_parts: UserParts) -> Recipe:
    configured = PreferenceLossFn(CentredMargin(config.rm.margin, config.rm.center_rewards_coefficient))
    return Recipe(
        tokenizer=tokenizer,
        data=user_parts.data(config, lambda: setup_preference_data(tokenizer, config.data)),
        collate=collate_pairs(config.policy, tokenizer),
        loss_fn=user_parts.loss(configured, config.loss_fn, rows_per_sample=2),
        roles=config.models,
        rows_per_sample=2,
        validator=lambda of_loss: RMValidator(of_loss.batches, of_loss.policy, configured, of_loss.micro_batch_rows),
    )


def _of_scores(config: RMMasterConfig, tokenizer: PreTrainedTokenizerBase, user_parts: UserParts) -> Recipe:
    names = config.head.attributes
    columns = ScoreColumns(tuple(names), config.rm.min_score, config.rm.max_score)
    configured = RegressionLossFn(loss_weights(names, config.rm.attribute_weights))
    return Recipe(
        tokenizer=tokenizer,
        data=user_parts.data(config, lambda: setup_scored_data(tokenizer, config.data, columns)),
        collate=collate_by(scored_collate_fn, config.policy, tokenizer),
        loss_fn=user_parts.loss(configured, config.loss_fn),
        roles=config.models,
        stages=lambda models: [ScoreCounts()],
        validator=lambda of_loss: RegressionValidator(
            of_loss.batches, of_loss.policy, configured, of_loss.micro_batch_rows
        ),
    )


def _of_steps(config: RMMasterConfig, tokenizer: PreTrainedTokenizerBase, user_parts: UserParts) -> Recipe:
    configured = StepLossFn()
    return Recipe(
        tokenizer=tokenizer,
        data=user_parts.data(config, lambda: setup_step_data(tokenizer, config.data, config.rm.step_separator)),
        collate=collate_by(labelled_steps_collate_fn, config.policy, tokenizer),
        loss_fn=user_parts.loss(configured, config.loss_fn),
        roles=config.models,
        validator=lambda of_loss: StepValidator(of_loss.batches, of_loss.policy, configured, of_loss.micro_batch_rows),
    )


setup = SupervisedSetup(RMMasterConfig, recipe)
"""Build a reward-model run and start its workers. Arguments and errors are those of `grpo.setup`."""


class Scorer(Protocol):
    """Interface of a reward model."""

    def score(self, data: BatchedDataDict[Any], micro_batch_size: int | None = None) -> BatchedDataDict[Any]:
        """Return `scores [B]`, in microbatches of `micro_batch_size` rows, or of the configured size if it is None."""


@dataclass(frozen=True)
class RMValidator:
    """A validation on held-out pairs."""

    batches: Iterable[BatchedDataDict[Any]]
    """Validation batches. Each validation iterates over them again."""
    scorer: Scorer
    """The reward model."""
    loss_fn: PreferenceLossFn
    """Loss of the training, which is reported for validation too."""
    micro_batch_rows: int | None = None
    """Number of rows of a rank's microbatch. If None, the configured number."""

    def __call__(self, step: int) -> dict[str, float]:
        """Return loss, accuracy, mean scores, margin and calibration error over all valid pairs."""
        scores: list[Tensor] = []
        masks: list[Tensor] = []
        margins: list[Tensor] = []
        for batch in self.batches:
            scores.append(self.scorer.score(batch, self.micro_batch_rows)["scores"].double())
            masks.append(batch["sample_mask"].double())
            margins.append(batch["margin"].double() if "margin" in batch else torch.zeros_like(masks[-1]))
        scores_B, mask_B = torch.cat(scores), torch.cat(masks)
        data = {"sample_mask": mask_B, "margin": torch.cat(margins)}
        _, metrics = self.loss_fn(scores_B, data=data, global_valid_seqs=mask_B.sum())
        margin_P = (scores_B[0::2] - scores_B[1::2])[mask_B[0::2] > 0]
        return {name: float(value) for name, value in metrics.items()} | {
            "calibration_error": calibration_error(margin_P)
        }


def calibration_error(margin_P: Tensor, num_bins: int = CALIBRATION_BINS) -> float:
    """Return the expected calibration error (arXiv 1706.04599, equation 3) of the predicted orders of pairs.

    Pairs are grouped into bins by confidence, `sigmoid(|margin|)` in 0.5 to 1. The result is the mean over pairs of the
    distance between the share of right orders in the pair's bin (a tie counts half) and the bin's mean confidence.

    Args:
        margin_P: Score of the chosen answer minus score of the rejected one.
        num_bins: Number of bins, all of equal width.

    Example:
        >>> calibration_error(torch.zeros(4))
        0.0
    """
    if not len(margin_P):
        return 0.0
    confidence_P = torch.sigmoid(margin_P.double().abs())
    right_P = (margin_P > 0).double() + 0.5 * (margin_P == 0).double()
    bin_P = ((confidence_P - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)
    gap_bins = torch.zeros(num_bins, dtype=torch.float64).index_add(0, bin_P, right_P - confidence_P)
    return float(gap_bins.abs().sum() / len(margin_P))
