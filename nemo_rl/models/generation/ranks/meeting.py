"""Bring the processes of one engine together: one process group, and what each has to know about the others.

Processes are on one machine or on several; `RayWorkerGroup` numbers them machine by machine. Invariant: a process sees
the GPUs of the engine's processes on its machine, in the order of their places.
"""

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import ray
import torch.distributed as dist

from nemo_rl.distributed.ranks.process_group import address_towards, choose_interface, open_store
from nemo_rl.host.device import device_for, gpu_is_in_use
from nemo_rl.models.generation.interfaces import EngineSettings, engine_of
from nemo_rl.utils.errors import GenerationError

_TIMEOUT = timedelta(minutes=30)
"""Longer than every deadline for starting engines; a process that does not come has usually died."""


@dataclass(frozen=True)
class Meeting:
    """The processes of an engine."""

    store: dist.Store
    """Shared by all of them."""
    place: int
    """Number of this process: its rank in the process group."""
    machines: tuple[int, ...]
    """Machine of each place, as the number of the first place on it."""
    address: str = "127.0.0.1"
    """Address of this process's machine, for the others."""

    @property
    def machine(self) -> int:
        """Machine of this process."""
        return self.machines[self.place]

    @property
    def local_place(self) -> int:
        """Number of this process among those on its machine, and the index of its GPU."""
        return self.machines[: self.place].count(self.machine)

    def is_near(self, places: Iterable[int]) -> bool:
        """Return whether these places are on the machine of this process."""
        return all(self.machines[place] == self.machine for place in places)


def meet(settings: EngineSettings) -> Meeting:
    """Return the meeting of this process with the others of its engine; its rank is in the variable RANK."""
    _, place = engine_of(int(os.environ["RANK"]), settings.num_workers)
    return enter_engine(settings.device, place, settings.num_workers)


@functools.cache
def enter_engine(device: str, place: int, num_places: int) -> Meeting:
    """Form the default process group of an engine's processes, and let each process see the GPUs of its machine.

    The first call does this, later ones return its result. vLLM checks which of its GPUs can access each other,
    so every process needs all of its machine in the same order.

    Args:
        device: "cpu" or "cuda".
        place: number of this process.
        num_places: number of processes of the engine.

    Raises:
        GenerationError: this process has used a GPU already.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    kind = device_for(uses_gpu=device != "cpu")
    choose_interface(address)
    own_address = address_towards(address) or address
    store = open_store(address, port, place, num_places, _TIMEOUT)
    names = _shared(store, "machine", place, num_places, _name_of_machine())
    meeting = Meeting(store, place, tuple(names.index(name) for name in names), own_address)
    if kind.is_gpu:
        if num_places > 1 and gpu_is_in_use():
            raise GenerationError(
                f"Process {place} of an engine has used a GPU before it met the others, so it cannot see theirs any "
                "more. Something that it imports starts CUDA: look at policy.generation.engine.env_vars and at modules "
                "of your own that the engine loads."
            )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", str(meeting.local_place))
        gpus = _shared(store, "gpu", place, num_places, visible)
        near = [gpu for gpu, machine in zip(gpus, meeting.machines, strict=True) if machine == meeting.machine]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(near)
    dist.init_process_group(kind.collective_backend, store=store, rank=place, world_size=num_places)
    return meeting


def _name_of_machine() -> str:
    """Return a name that processes of the same machine share; Ray's, as it may move two sets of places to one node."""
    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else os.environ.get("NODE_RANK", "0")


def _shared(store: dist.Store, name: str, place: int, num_places: int, own: str) -> tuple[str, ...]:
    """Tell all processes a text, and return those of all, in the order of their places."""
    store.set(f"{name} of {place}", own)
    return tuple(store.get(f"{name} of {other}").decode() for other in range(num_places))
