"""The models of a run by name: what each is for and on whose devices it runs.

`MasterConfig.models` makes the mapping name -> `Role`. Whatever depends on the models reads it: preflight, topology,
memory forecast, placement, dry run, resume check, size of checkpoints, start. Invariant: the only name with a meaning
is "policy", the model that the loss of the run trains and that engines sample from.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_rl.config.schema.model.policy import PolicyConfig


@dataclass(frozen=True)
class Role:
    """A model of a run."""

    section: PolicyConfig
    """Its keys; `section.placement` says on which devices it runs."""
    trains: bool = True
    """Has an optimizer and is saved in checkpoints; else it is frozen, for inference only."""
    keeps_reference: bool = False
    """Keep the initial weights for reference log-probabilities."""

    @property
    def shares_with(self) -> str | None:
        """Name of the model whose devices it uses, "policy" for the policy itself; None: it has its own devices."""
        return self.section.placement.shares_with


def trained(models: Mapping[str, Role]) -> dict[str, Role]:
    """The models that are trained, which are those that a checkpoint holds."""
    return {name: role for name, role in models.items() if role.trains}


def sharing(models: Mapping[str, Role]) -> dict[str, list[str]]:
    """The models on each group of devices, by the name of the model that owns the devices; the owner is first."""
    owners = [name for name, role in models.items() if role.shares_with in (None, name)]
    members = {name: role.shares_with for name, role in models.items() if name not in owners}
    return {owner: [owner, *(name for name, host in members.items() if host == owner)] for owner in owners}
