"""Let models and engines that share devices use them in turns. The state of an idle one is in host memory.

Invariant: before a model or the engines work, the other users of the devices are moved to host memory.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_rl.config import ClusterConfig, Role, sharing, trained
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.training.backends import training_backend


class DeviceUser(Protocol):
    """A model or the engines, with state on shared devices. Repeated calls of a method have no effect."""

    def rest(self) -> None:
        """Move the state to host memory, as far as that is possible."""

    def wake(self) -> None:
        """Move the state back to the device."""


@dataclass(frozen=True)
class TrainedModel:
    """A model under training. It releases its optimizer state but keeps its weights, for example for a weight sync."""

    policy: Policy

    def rest(self) -> None:
        """Move the optimizer state to host memory."""
        self.policy.offload_optimizer()

    def wake(self) -> None:
        """Move the optimizer state back."""
        self.policy.onload_optimizer()


@dataclass(frozen=True)
class SecondTrainedModel:
    """A model under training that releases its optimizer state and its weights, because no engine needs the weights."""

    policy: Policy

    def rest(self) -> None:
        """Move optimizer state and weights to host memory."""
        self.policy.offload_optimizer()
        self.policy.offload_weights()

    def wake(self) -> None:
        """Move weights and optimizer state back."""
        self.policy.onload_weights()
        self.policy.onload_optimizer()


@dataclass(frozen=True)
class FrozenModel:
    """A model for inference only, which releases its weights."""

    policy: Policy

    def rest(self) -> None:
        """Move the weights to host memory."""
        self.policy.offload_weights()

    def wake(self) -> None:
        """Move the weights back."""
        self.policy.onload_weights()


def device_user(name: str, role: Role, model: Policy) -> DeviceUser:
    """Return a `DeviceUser` for a model."""
    if not role.trains:
        return FrozenModel(model)
    keeps_weights = name == "policy" or not training_backend(role.section).offloads_trained_weights
    return TrainedModel(model) if keeps_weights else SecondTrainedModel(model)


def groups_of_models(roles: Mapping[str, Role], models: Mapping[str, Policy]) -> dict[str, dict[str, DeviceUser]]:
    """Return the models on each group of devices, by the name of the model that owns the devices."""
    return {
        owner: {name: device_user(name, roles[name], models[name]) for name in names}
        for owner, names in sharing(roles).items()
    }


class MemorySharing:
    """Decide which models and engines have their state on shared devices.

    Args:
        groups: For each group of shared devices, the models and engines on it, by name. A model with its own devices is
            in no group. On CPUs there are no groups, because CPUs use host memory only.
    """

    def __init__(self, *groups: Mapping[str, DeviceUser]):
        self._groups = groups
        self._working: list[set[str]] = [set() for _ in groups]

    def is_shared(self, name: str) -> bool:
        """Return whether the model or engines of this name share their devices."""
        return any(name in group for group in self._groups)

    def hand_to(self, names: Collection[str]) -> None:
        """Move all other users of the devices to host memory, and then move these models and engines to the devices.

        Args:
            names: Models and engines that are about to work. Devices that none of them uses stay as they are.
        """
        for number, users in enumerate(self._groups):
            working = users.keys() & set(names)
            if not working or working == self._working[number]:
                continue
            for name, user in users.items():
                if name not in working:
                    user.rest()
            for name in working:
                users[name].wake()
            self._working[number] = working


def share_memory(
    cluster: ClusterConfig, roles: Mapping[str, Role], models: Mapping[str, Policy], engines: DeviceUser | None = None
) -> MemorySharing:
    """Build the object that lets models and engines share GPUs in turns."""
    groups = groups_of_models(roles, models)
    if engines is not None:
        groups["policy"] = {"generation": engines} | groups["policy"]
    return MemorySharing(*(group for group in groups.values() if cluster.uses_gpu and len(group) > 1))


@dataclass(frozen=True)
class SavedOnDevice:
    """Model other than the policy, which is moved to its devices before it is saved (`saving.BackgroundSavable`)."""

    name: str
    """Name of the model."""
    model: Policy
    memory: MemorySharing
    """Object that moves the model to its devices."""

    def save_checkpoint(self, *paths: Any, **options: Any) -> None:
        """Move the model to its devices and save it (`Policy.save_checkpoint`)."""
        self.memory.hand_to((self.name,))
        self.model.save_checkpoint(*paths, **options)

    def checkpoint_is_written(self) -> bool:
        """Return whether the background write has ended (`Policy.checkpoint_is_written`)."""
        return self.model.checkpoint_is_written()

    def finalize_async_save(self) -> None:
        """Wait for the background write (`Policy.finalize_async_save`)."""
        self.model.finalize_async_save()


def saved_models(
    roles: Mapping[str, Role], models: Mapping[str, Policy], memory: MemorySharing
) -> dict[str, Policy | SavedOnDevice]:
    """Return the models that a checkpoint contains, by name."""
    return {
        name: models[name] if name == "policy" else SavedOnDevice(name, models[name], memory) for name in trained(roles)
    }
