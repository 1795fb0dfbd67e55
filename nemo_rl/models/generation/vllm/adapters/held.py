"""Give a running vLLM engine adapters from memory, and name them in its requests.

vLLM's request of an adapter (`LoRARequest`) has a path from which a worker reads it when it is needed first. Here the
adapter is in the worker before any request names it, so nothing is read and the path is only a name. Invariant: an id
and a name of vLLM are never used for two adapters, except for the adapter of weight syncs, whose cached keys and values
are dropped like those of all weights (`engine.VllmEngine.finish_loading`).
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.kv_cache_interface import KVCacheConfig

from nemo_rl.config import LoraConfig
from nemo_rl.models.adapters.tensors import AdapterTensors
from nemo_rl.models.generation.stepped import Finished
from nemo_rl.models.generation.vllm.adapters.products import AdapterProducts
from nemo_rl.models.huggingface.folders import peft_key
from nemo_rl.models.training.low_rank import ADAPTER_PARAMETERS
from nemo_rl.models.training.tensor_checks import not_finite
from nemo_rl.utils.errors import ConfigError, GenerationError

_A, _B = ADAPTER_PARAMETERS


@dataclass
class HeldAdapters:
    """Adapters of an engine by their names in requests."""

    engine: LLMEngine
    """The engine."""
    _requests: dict[str, LoRARequest] = field(default_factory=dict)
    _running: dict[str, LoRARequest] = field(default_factory=dict)
    """Adapter of each running request that has one."""
    _ids: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def add(self, name: str, adapter: AdapterTensors) -> None:
        """Hold an adapter. Running requests of an adapter of the same name keep theirs.

        Raises:
            GenerationError: The rank is larger than that of the slots.
        """
        config = self.engine.vllm_config.lora_config
        assert config is not None, "the engine was built for adapters"
        if adapter.shape.rank > config.max_lora_rank:
            raise GenerationError(
                f"The adapter {name!r} has rank {adapter.shape.rank}, and the slots of this engine have "
                f"{config.max_lora_rank}."
            )
        number = next(self._ids)
        scalings = {layer: pair.scaling for layer, pair in adapter.pairs.items()}
        tensors = scaled(adapter.parameters(), scalings)
        self.engine.collective_rpc(partial(hold_adapter, number=number, tensors=tensors, rank=adapter.shape.rank))
        self.drop(name)
        self._requests[name] = LoRARequest(f"{name} {number}", number, f"memory:{number}")

    def drop(self, name: str) -> None:
        """Forget an adapter. It stays in memory until its running requests have ended."""
        dropped = self._requests.pop(name, None)
        if dropped is not None and dropped not in self._running.values():
            self._free(dropped)

    def of_name(self, name: str) -> LoRARequest:
        """Return the adapter of a name.

        Raises:
            GenerationError: There is none.
        """
        if name not in self._requests:
            raise GenerationError(f"The engine has no adapter {name!r}.")
        return self._requests[name]

    def note_start(self, request_id: str, adapter: LoRARequest) -> None:
        """Note that a request uses an adapter until `note_end`."""
        self._running[request_id] = adapter

    def note_end(self, request_id: str) -> None:
        """Note that a request has ended."""
        adapter = self._running.pop(request_id, None)
        if adapter is not None and adapter not in (*self._requests.values(), *self._running.values()):
            self._free(adapter)

    def overflowed(self, request_id: str) -> Finished | None:
        """Return the failure of a running request whose logits are not finite, or None if it has no adapter."""
        adapter = self._running.get(request_id)
        if adapter is None:
            return None
        name = adapter.lora_name.rpartition(" ")[0]
        return Finished(request_id, [], [], "abort", f"The logits of {name!r} are not finite.")

    def _free(self, adapter: LoRARequest) -> None:
        self.engine.collective_rpc(partial(free_adapter, number=adapter.lora_int_id))


@dataclass
class SentAdapter:
    """The adapter of all requests, which weight syncs send."""

    engine: LLMEngine
    """The engine."""
    config: LoraConfig
    """Shape of the adapter."""
    layers: Sequence[str]
    """Names of its layers."""
    spoilt: list[str] = field(default_factory=list)
    """Names of parameters of the last sync that are not finite."""
    request: LoRARequest | None = None
    """Name of the adapter in requests. None before the first sync."""
    _received: dict[str, Tensor] = field(default_factory=dict)

    def begin(self) -> None:
        """Prepare to receive every tensor."""
        self._received = {}

    def receive(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keep copies of some tensors.

        Raises:
            GenerationError: A tensor does not belong to the adapter.
        """
        expected = self._expected()
        for name, tensor in tensors:
            if name not in expected:
                raise GenerationError(f"The engine's model has no tensor named {name}.")
            self._received[name] = tensor.clone()

    def finish(self) -> list[str]:
        """Use the received adapter from now on, unless it is not whole. Return the names of missing tensors."""
        missing = sorted(self._expected() - self._received.keys())
        if missing:
            return missing
        received, self._received = self._received, {}
        self.spoilt = not_finite(received)
        rank, factor = self.config.dim, self.config.alpha / self.config.dim
        tensors = scaled(received, dict.fromkeys(self.layers, factor))
        self.engine.collective_rpc(partial(hold_adapter, number=1, tensors=tensors, rank=rank))
        self.request = LoRARequest("policy", 1, "memory:policy")
        return []

    def _expected(self) -> set[str]:
        return {f"{layer}.{last}" for layer in self.layers for last in ADAPTER_PARAMETERS}


def scaled(parameters: Mapping[str, Tensor], scalings: Mapping[str, float]) -> dict[str, Tensor]:
    """Return copies of A and B by PEFT's names, with the scale of each layer in B."""
    found = {}
    for name, value in parameters.items():
        layer, _, last = name.rpartition(".")
        copy = value.detach().clone()
        found[peft_key(name)] = copy.mul_(scalings[layer]) if last == _B else copy
    return found


def clear_new_blocks() -> None:
    """Let vLLM in this process set the blocks of its cache to 0 before a request uses them. Call it before vLLM starts.

    vLLM multiplies all keys and values of a block, and those after the last token by 0. If an adapter has overflowed,
    its blocks contain NaN, which would spoil the requests that get the blocks next.
    """
    kind: Any = KVCacheConfig
    kind.needs_kv_cache_zeroing = property(lambda config: True)


def require_layers(engine: LLMEngine, layers: Sequence[str]) -> None:
    """Check that vLLM adapts the layers.

    Raises:
        ConfigError: It does not. The message names them.
    """
    (unfit,) = engine.collective_rpc(partial(unfit_layers, layers=layers)) if layers else ([],)
    if unfit:
        raise ConfigError(
            f"vLLM has no place for adapters of {len(unfit)} of {len(layers)} layers, for example {unfit[0]!r}. Set "
            "policy.generation.backend=hf, or do not adapt them."
        )


def unfit_layers(worker: Any, layers: Sequence[str]) -> list[str]:
    """Return the layers that a worker of vLLM cannot adapt."""
    manager = worker.model_runner.get_model().lora_manager
    places = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
    mapper = _renaming(manager.model)
    return [name for name in layers if parse_fine_tuned_lora_name(peft_key(f"{name}.{_A}"), mapper)[0] not in places]


def hold_adapter(worker: Any, number: int, tensors: dict[str, Tensor], rank: int) -> None:
    """Hold an adapter in a worker of vLLM, in place of one with the same number.

    Args:
        number: vLLM's id of the adapter.
        tensors: A and B by PEFT's names, with the scale in B. They must not change afterwards.
        rank: number of rows of A.
    """
    manager = worker.model_runner.get_model().lora_manager
    adapter = LoRAModel.from_lora_tensors(
        number,
        tensors,
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=_renaming(manager.model),
    )
    manager.remove_adapter(number)
    manager.add_adapter(adapter)
    for products in manager.punica_wrapper_mapping.values():
        if isinstance(products, AdapterProducts):
            products.ranks[number] = rank


def free_adapter(worker: Any, number: int) -> None:
    """Free an adapter in a worker of vLLM."""
    manager = worker.model_runner.get_model().lora_manager
    manager.remove_adapter(number)
    for products in manager.punica_wrapper_mapping.values():
        if isinstance(products, AdapterProducts):
            products.ranks.pop(number, None)


def _renaming(model: Any) -> Any:
    """Return vLLM's map from names of Hugging Face to its own, or None if they are equal."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()
