"""Offloaded tensors are in host memory that is allocated once, and offloading changes no number.

On a CPU "the device" is host memory too, so `_takes_turns`, which is for GPUs, is set by hand.
"""

from types import SimpleNamespace

import pytest
import torch
from policy_helpers import policy_config, process_group, random_batch, run_ranks, save_tiny_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from trained_states import assert_equal_states, update, whole_state

from nemo_rl.algorithms.runtime.device_sharing import FrozenModel, MemorySharing, SecondTrainedModel, TrainedModel
from nemo_rl.host import device as device_module
from nemo_rl.host.device import exact_page_locking
from nemo_rl.models.dtensor import backend as backend_module
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.models.training import torch_backend
from nemo_rl.models.training.torch_backend import HostMemory, move_weights

CPU = torch.device("cpu")


class Allocations(TorchDispatchMode):
    """Counts the tensors that are made."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func.__name__.startswith(("empty", "new_empty", "_to_copy", "clone"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("environment", "want"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:1"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,pinned_max_round_threshold_mb:1"},
        ),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,pinned_max_round_threshold_mb:1"},
        ),
        ({"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:512"}, {}),
    ],
)
def test_torch_takes_the_setting_that_ends_rounding(
    environment: dict[str, str], want: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other settings stay; torch refuses names that it does not know."""
    assert exact_page_locking(environment) == want
    for name, settings in environment.items():
        monkeypatch.setenv(name, settings)
    assert exact_page_locking({}) == want
    for settings in want.values():
        torch._C._accelerator_setAllocatorSettings(settings)
    with pytest.raises(ValueError, match="Unrecognized"):
        torch._C._accelerator_setAllocatorSettings("pinned_max_round_threshold:1")


def test_host_memory_is_allocated_once(monkeypatch) -> None:
    pinned: list[bool] = []
    empty_like = torch.empty_like

    def without_gpu(tensor, *, device, pin_memory):
        pinned.append(pin_memory)
        return empty_like(tensor, device=device)

    monkeypatch.setattr(torch, "empty_like", without_gpu)
    memory = HostMemory(pinned=True)
    tensors = [{name: torch.randn(3, 4) for name in "ab"} for _ in range(3)]
    places = []
    for turn, named in enumerate(tensors):
        with Allocations() as made:
            held = {name: memory.store(name, tensor) for name, tensor in named.items()}
        assert made.num == (2 if turn == 0 else 0)
        assert all(torch.equal(held[name], named[name]) for name in named)
        places.append([tensor.data_ptr() for tensor in held.values()])
    assert places[0] == places[1] == places[2]
    assert pinned == [True, True]


def _worker(name: str, takes_turns: bool, *, frozen: bool = False, **values) -> tuple[PolicyWorker, object]:
    config = policy_config(name, **values)
    backend = DTensorBackend(config, CPU, init_optimizer=not frozen, init_reference_model=not frozen)
    assert not backend._takes_turns, "host memory holds everybody on a CPU"
    backend._takes_turns = takes_turns
    return PolicyWorker(backend, config), config


def _storages(tensors) -> list[torch.UntypedStorage]:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return [tensor.untyped_storage() for tensor in local if tensor.dim() > 0]


def _places(tensors) -> list[int]:
    return [storage.data_ptr() for storage in _storages(tensors)]


def _optimizer_tensors(worker: PolicyWorker) -> list[Tensor]:
    states = worker.backend.optimizer.state.values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def _optimizer_places(worker: PolicyWorker) -> list[int]:
    return _places(_optimizer_tensors(worker))


def _train_in_turns(rank: int, world_size: int, name: str, folder: str) -> None:
    worker, config = _worker(name, takes_turns=True)
    alone, _ = _worker(name, takes_turns=False)
    at_rest = []
    for seed in (1, 2, 3):
        worker.move_optimizer_state(to_host=False)
        update(worker, config, seed, rank, world_size)
        update(alone, config, seed, rank, world_size)
        assert not set(_optimizer_places(worker)) & {place for places in at_rest for place in places}
        for _ in range(2):  # the second call does nothing
            worker.move_optimizer_state(to_host=True)
            at_rest.append(_optimizer_places(worker))
        assert_equal_states(whole_state(worker), whole_state(alone))
        batch = random_batch(rows=2)
        reference = worker.get_reference_policy_logprobs(batch, [2])
        assert torch.equal(reference, alone.get_reference_policy_logprobs(batch, [2]))
    assert len(at_rest[0]) > 10 and all(places == at_rest[0] for places in at_rest)
    worker.save_checkpoint(f"{folder}/weights", f"{folder}/optimizer")  # offloaded, as after a validation
    again, _ = _worker(name, takes_turns=True)
    again.load_checkpoint(f"{folder}/weights", f"{folder}/optimizer")
    assert_equal_states(whole_state(again), whole_state(alone))


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_optimizer_offloaded_between_updates_makes_the_same_updates(world_size, tmp_path) -> None:
    run_ranks(_train_in_turns, world_size, save_tiny_model(tmp_path / "m", tie=True), str(tmp_path / "step"))


def _second_model_in_turns(rank: int, world_size: int, name: str, precision: str, folder: str) -> None:
    critic, config = _worker(name, takes_turns=True, precision=precision)
    policy, _ = _worker(name, takes_turns=True, precision=precision)
    alone, _ = _worker(name, takes_turns=False, precision=precision)
    events: list[str] = []
    memory = MemorySharing(
        {
            "policy": TrainedModel(Local(policy, "policy", events)),
            "critic": SecondTrainedModel(Local(critic, "critic", events)),
        }
    )
    for seed in (1, 2, 3):
        memory.hand_to(("critic",))
        update(critic, config, seed, rank, world_size)
        update(alone, config, seed, rank, world_size)
        assert_equal_states(whole_state(critic), whole_state(alone))
        # Held, so that no later tensor can get the same address.
        held = _storages(critic.backend.model.parameters()) + _storages(_optimizer_tensors(critic))
        on_device = {storage.data_ptr() for storage in held}
        memory.hand_to(("policy",))
        assert not on_device & {*_places(critic.backend.model.parameters()), *_optimizer_places(critic)}
    memory.hand_to(("critic",))
    critic.save_checkpoint(f"{folder}/weights", f"{folder}/optimizer")
    again, _ = _worker(name, takes_turns=True, precision=precision)
    again.load_checkpoint(f"{folder}/weights", f"{folder}/optimizer")
    assert_equal_states(whole_state(again), whole_state(alone))
    rests, wakes = ["critic optimizer rests", "critic weights rest"], ["critic weights wake", "critic optimizer wakes"]
    first = ["policy optimizer rests", *wakes]
    turn = [*rests, "policy optimizer wakes", *first]
    assert events == [*first, *3 * turn]


@pytest.mark.parametrize(("world_size", "precision"), [(1, "float32"), (1, "bfloat16"), (2, "float32")])
def test_a_second_trained_model_gives_its_weights_up_in_its_turn(world_size, precision, tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m", tie=True)
    run_ranks(_second_model_in_turns, world_size, name, precision, str(tmp_path / "step"))


def _reference_places(name: str) -> None:
    worker, config = _worker(name, takes_turns=False)
    batch = random_batch(rows=2)
    for seed in (1, 2):
        update(worker, config, seed)
        with Allocations() as made, worker.backend.reference_weights():
            first_turn = seed == 1
        assert (made.num > 0) is first_turn, "host memory for the trained weights is taken once"
        worker.get_reference_policy_logprobs(batch, [2])


def test_reference_weights_are_swapped_through_the_same_memory(tmp_path) -> None:
    with process_group():
        _reference_places(save_tiny_model(tmp_path / "m"))


class Local:
    """A policy in this process with what `FrozenModel` and `TrainedModel` need."""

    def __init__(self, worker: PolicyWorker, name: str, events: list[str]):
        self.worker, self.name, self.events = worker, name, events

    def _note(self, what: str) -> None:
        self.events.append(f"{self.name} {what}")

    def offload_weights(self) -> None:
        self._note("weights rest")
        self.worker.move_weights(to_host=True)

    def onload_weights(self) -> None:
        self._note("weights wake")
        self.worker.move_weights(to_host=False)

    def offload_optimizer(self) -> None:
        self._note("optimizer rests")
        self.worker.move_optimizer_state(to_host=True)

    def onload_optimizer(self) -> None:
        self._note("optimizer wakes")
        self.worker.move_optimizer_state(to_host=False)


def _teacher_in_turns(rank: int, world_size: int, teacher_name: str, name: str, precision: str, even: bool) -> None:
    teacher, _ = _worker(teacher_name, takes_turns=True, frozen=True, precision=precision)
    policy, config = _worker(name, takes_turns=True, precision=precision)
    data = random_batch(rows=2)
    want = teacher.get_topk_logits(data, [2], 5)
    events: list[str] = []
    memory = MemorySharing(
        {
            "policy": TrainedModel(Local(policy, "policy", events)),
            "teacher": FrozenModel(Local(teacher, "teacher", events)),
        }
    )
    at_rest = []
    for seed in (1, 2):
        memory.hand_to(("teacher",))
        assert not set(_places(teacher.backend.model.parameters())) & {place for places in at_rest for place in places}
        got = teacher.get_topk_logits(data, [2], 5)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        memory.hand_to(("policy",))
        at_rest.append(_places(teacher.backend.model.parameters()))
        update(policy, config, seed, rank, world_size)
    if even:  # FSDP2 pads an uneven shard in separate memory
        assert at_rest[0] == at_rest[1]
        assert set(at_rest[0]) <= set(_places(teacher.backend._resting._copies.values()))
    turn = ["policy optimizer rests", "teacher weights wake", "teacher weights rest", "policy optimizer wakes"]
    assert events == 2 * turn


@pytest.mark.parametrize(
    ("world_size", "precision", "vocab_size"),
    [(1, "float32", 97), (1, "bfloat16", 97), (2, "float32", 98), (2, "float32", 97)],
)
def test_a_frozen_model_moves_its_weights_to_the_host_after_its_pass(
    world_size, precision, vocab_size, tmp_path
) -> None:
    teacher = save_tiny_model(tmp_path / "t", "gemma3", tie=True, vocab_size=vocab_size)
    even = vocab_size % world_size == 0
    run_ranks(_teacher_in_turns, world_size, teacher, save_tiny_model(tmp_path / "m"), precision, even)


def test_weights_reach_the_host_before_the_model_reads_them(monkeypatch) -> None:
    events: list[str] = []

    class Model(torch.nn.Linear):
        def _apply(self, fn, recurse=True):
            events.append("apply")
            return super()._apply(fn, recurse)

    class Memory(HostMemory):
        def store(self, name, tensor):
            events.append(f"store {name}")
            return super().store(name, tensor)

    monkeypatch.setattr(
        torch_backend, "device_for", lambda uses_gpu: SimpleNamespace(synchronize=lambda: events.append("synchronize"))
    )
    move_weights(Model(2, 2), Memory(pinned=False), CPU, to_host=True)
    assert events == ["store weight", "store bias", "synchronize", "apply"]


@pytest.mark.parametrize("frozen", [True, False])
def test_cached_memory_is_released_after_the_copies(frozen, tmp_path, monkeypatch) -> None:
    events: list[str] = []
    device = SimpleNamespace(
        synchronize=lambda: events.append("synchronize"), empty_cache=lambda: events.append("empty cache")
    )
    monkeypatch.setattr(device_module, "device_for", lambda uses_gpu: device)
    monkeypatch.setattr(backend_module, "move_state", lambda *_, to_host: events.append(f"state {to_host}"))
    monkeypatch.setattr(backend_module, "move_weights", lambda *_, to_host: events.append(f"weights {to_host}"))
    with process_group():
        worker, _ = _worker(save_tiny_model(tmp_path / "m"), takes_turns=True, frozen=frozen)
        worker.move_optimizer_state(to_host=True)
        worker.move_weights(to_host=True)
    given_back = ["synchronize", "empty cache"]
    state = [] if frozen else ["state True"]
    assert events == [*state, *given_back, "weights True", *given_back]


@pytest.mark.parametrize("arch", ["qwen2", "gemma3"])
def test_a_frozen_model_in_compute_precision_gives_the_same_scores(arch, tmp_path, monkeypatch) -> None:
    name = save_tiny_model(tmp_path / "m", arch, tie=True)
    data = random_batch(rows=2)
    found = []
    with process_group():
        for on_gpu in (False, True):
            if on_gpu:
                monkeypatch.setattr(backend_module, "_stores_compute_precision", lambda device: True)
            teacher, _ = _worker(name, takes_turns=False, frozen=True, precision="bfloat16")
            sizes = {parameter.dtype for parameter in teacher.backend.model.parameters()}
            assert sizes == {torch.bfloat16 if on_gpu else torch.float32}
            found.append((*teacher.get_topk_logits(data, [2], 5), teacher.get_logprobs(data, [2])))
        trained, _ = _worker(name, takes_turns=False, precision="bfloat16")
        assert {parameter.dtype for parameter in trained.backend.model.parameters()} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
