"""Set up runs of direct preference optimisation (arXiv 2305.18290), which learn from pairs of answers.

With `dpo.preference_loss=kto` the recipe is that of `kto`. Each batch also holds the log-probabilities of the initial
model. Invariant: from the data to the loss, row 2i is the chosen answer of pair i, and row 2i + 1 the rejected one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_rl.algorithms import kto
from nemo_rl.algorithms.recipe import Recipe
from nemo_rl.algorithms.runtime.run import Stage, StepBatch
from nemo_rl.algorithms.runtime.run import train_with_restarts as dpo_train
from nemo_rl.algorithms.setup.user_parts import NOTHING, UserParts
from nemo_rl.algorithms.start import SupervisedSetup
from nemo_rl.algorithms.supervised import collate_pairs, from_section
from nemo_rl.config import DPOConfig, DPOMasterConfig, Role
from nemo_rl.data.datasets.setup import setup_preference_data
from nemo_rl.losses.loss_function import LossFunction
from nemo_rl.losses.preference import DPOLossConfig, DPOLossFn
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.seed import set_seed

__all__ = ["DPOConfig", "MasterConfig", "ReferenceLogprobs", "dpo_train", "recipe", "setup"]

MasterConfig = DPOMasterConfig


@dataclass(frozen=True)
class ReferenceLogprobs:
    """Stage that adds `reference_policy_logprobs [2P, T]` to a batch of P pairs (`runtime.run.Stage`)."""

    policy: PolicyInterface
    """The trained policy, which keeps its initial weights."""
    name = "policy_and_reference_logprobs"
    roles = ("policy",)

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Write the log-probabilities of the initial model."""
        scores = self.policy.get_reference_policy_logprobs(batch.tensors)
        batch.tensors["reference_policy_logprobs"] = scores["reference_logprobs"]
        return {}


def recipe(config: DPOMasterConfig, user_parts: UserParts = NOTHING) -> Recipe:
    """Build the recipe of DPO or KTO without starting anything. Arguments and errors are those of `sft.recipe`."""
    set_seed(config.dpo.seed)
    tokenizer = user_parts.tokenizer_of(config.policy)
    if config.dpo.preference_loss == "kto":
        return kto.recipe(config, tokenizer, user_parts)
    configured = DPOLossFn(from_section(DPOLossConfig, config.dpo))
    loss_fn: LossFunction = user_parts.loss(configured, config.loss_fn, rows_per_sample=2)
    needs_reference = getattr(loss_fn, "needs_reference", configured.needs_reference)

    def stages(models: Mapping[str, Policy]) -> list[Stage]:
        return [ReferenceLogprobs(models["policy"])] if needs_reference else []

    return Recipe(
        tokenizer=tokenizer,
        data=user_parts.data(config, lambda: setup_preference_data(tokenizer, config.data)),
        collate=collate_pairs(config.policy, tokenizer),
        loss_fn=loss_fn,
        roles=config.models | {"policy": Role(config.policy, keeps_reference=needs_reference)},
        rows_per_sample=2,
        stages=stages,
    )


setup = SupervisedSetup(DPOMasterConfig, recipe)
"""Build a DPO run and start its workers. Arguments and errors are those of `grpo.setup`."""
