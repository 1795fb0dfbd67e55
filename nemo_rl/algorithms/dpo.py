"""Direct preference optimisation (arXiv 2305.18290): learning from pairs of a preferred and a rejected answer.

How a run is put together, and re-exports; with `dpo.preference_loss=kto` the run is that of `kto`. Each batch also
holds the log-probabilities of the model that training started from. Invariant: row 2i is the chosen answer of pair i
and row 2i + 1 the rejected one, from the data to the loss.
"""

from dataclasses import dataclass

from nemo_rl.algorithms import kto
from nemo_rl.algorithms.runtime.run import Run, Stage, StepBatch
from nemo_rl.algorithms.runtime.run import train as dpo_train
from nemo_rl.algorithms.supervised.start import SupervisedRecipe, collate_pairs, from_section, start_run
from nemo_rl.config import DPOConfig, DPOMasterConfig
from nemo_rl.data.datasets.setup import setup_preference_data
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.losses.preference import DPOLossConfig, DPOLossFn
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.seed import set_seed

__all__ = ["DPOConfig", "MasterConfig", "ReferenceLogprobs", "dpo_train", "recipe", "setup"]

MasterConfig = DPOMasterConfig


@dataclass(frozen=True)
class ReferenceLogprobs:
    """The stage that adds `reference_policy_logprobs [2P, T]`; a `runtime.run.Stage`.

    Attributes:
        policy: keeps the weights that the run started from.
    """

    policy: PolicyInterface
    name = "policy_and_reference_logprobs"
    roles = ("policy",)

    def apply(self, batch: StepBatch) -> dict[str, float]:
        """Write the reference's log-probabilities."""
        scores = self.policy.get_reference_policy_logprobs(batch.tensors)
        batch.tensors["reference_policy_logprobs"] = scores["reference_logprobs"]
        return {}


def setup(config: DPOMasterConfig, started_at: float = 0.0) -> Run:
    """Build a DPO run and start its workers; arguments and errors as `grpo.setup`."""
    return start_run(config, recipe(config), started_at)


def recipe(config: DPOMasterConfig) -> SupervisedRecipe:
    """What makes a run of written data one of DPO, or of KTO; starts nothing. Errors as `sft.recipe`."""
    set_seed(config.dpo.seed)
    tokenizer = get_tokenizer(config.policy.tokenizer)
    if config.dpo.preference_loss == "kto":
        return kto.recipe(config, tokenizer)
    loss_fn = DPOLossFn(from_section(DPOLossConfig, config.dpo))

    def stages(policy: Policy) -> list[Stage]:
        return [ReferenceLogprobs(policy)] if loss_fn.needs_reference else []

    return SupervisedRecipe(
        tokenizer=tokenizer,
        data=setup_preference_data(tokenizer, config.data),
        collate=collate_pairs(config, tokenizer),
        loss_fn=loss_fn,
        rows_per_sample=2,
        keeps_reference=loss_fn.needs_reference,
        stages=stages,
    )
