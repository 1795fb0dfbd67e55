"""Compute a model with an adapter that is chosen for each pass.

`put_slots` replaces linear layers by modules that add the product of the adapter in use. The output head has a slot
too: `dtensor.heads` reads its weight, and adds the product to each chunk of logits. If the head and the embedding share
their weight, an adapter of the head changes the logits only.

Invariant: parameters keep their names, and without an adapter the outputs have the bits of the replaced layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.distributed.parallel_logprobs.head import HeadUpdate
from nemo_rl.models.adapters.shared_passes import SharedPairs, TokenShares
from nemo_rl.models.adapters.tensors import AdapterTensors, LowRankPair, linear
from nemo_rl.models.huggingface.layers import parts_without_text, score_head
from nemo_rl.models.huggingface.load import auto_class
from nemo_rl.models.huggingface.mixers import is_used_by_weight
from nemo_rl.models.huggingface.recurrent import compute_unfused
from nemo_rl.utils.errors import ConfigError


class SlotLinear(nn.Module):
    """A frozen linear layer, to whose output the product of an adapter's matrices is added.

    Args:
        base: the layer; its parameters are reused and frozen.
        is_head: whether it is the model's output head.
    """

    def __init__(self, base: nn.Linear, *, is_head: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self.is_head = base.in_features, base.out_features, is_head
        self.weight = base.weight.requires_grad_(False)
        """`[out, in]`. It is the base layer's own parameter, so its name does not change."""
        self.bias = base.bias if base.bias is None else base.bias.requires_grad_(False)
        """`[out]`, or None."""
        self.pair: LowRankPair | SharedPairs | None = None
        """Matrices of the adapters in use. None if only the base layer is computed."""

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in]` to `[..., out]`."""
        out = linear(x, self.weight, self.bias)
        return out if self.pair is None else self.pair.added_to(out, x)


def head_update(head: nn.Module, hidden_KD: Tensor) -> HeadUpdate | None:
    """Return the update of the output head by the adapters in use, or None without one."""
    return None if not isinstance(head, SlotLinear) or head.pair is None else head.pair.of_head(hidden_KD)


class AdapterSlots:
    """The slots of a model.

    Args:
        layers: the slots by the names of their layers.
    """

    def __init__(self, layers: Mapping[str, SlotLinear]) -> None:
        self._layers = dict(layers)
        self.head = next((name for name, layer in self._layers.items() if layer.is_head), None)
        """Name of the output head. None if it has no slot."""
        self.sizes = {name: (layer.out_features, layer.in_features) for name, layer in self._layers.items()}
        """Numbers of outputs and inputs of each layer that can be adapted."""

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module]) -> "AdapterSlots":
        """Find the slots among modules by name."""
        return cls({name: module for name, module in modules.items() if isinstance(module, SlotLinear)})

    @contextmanager
    def using(self, adapter: AdapterTensors | None) -> Iterator[None]:
        """Compute with an adapter, or with the base model, while the block runs."""
        with self._holding({} if adapter is None else adapter.pairs):
            yield

    @contextmanager
    def shared_by(self, adapters: Sequence[AdapterTensors], shares: TokenShares) -> Iterator[None]:
        """Compute with several adapters, each for its own tokens of a microbatch, while the block runs."""
        names = [name for name in self._layers if any(name in adapter.pairs for adapter in adapters)]
        of_layers = {name: [adapter.pairs.get(name) for adapter in adapters] for name in names}
        with self._holding({name: SharedPairs(name, pairs, shares) for name, pairs in of_layers.items()}):
            yield

    @contextmanager
    def _holding(self, pairs: Mapping[str, LowRankPair | SharedPairs]) -> Iterator[None]:
        for name, pair in pairs.items():
            self._layers[name].pair = pair
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.pair = None


def put_slots(hf: PreTrainedModel) -> AdapterSlots:
    """Freeze a model and replace its linear layers in place, before it is sharded.

    Raises:
        ConfigError: the model has no linear layer that can be adapted.
    """
    head, names = hf.get_output_embeddings(), slot_names(hf)
    if not names:
        raise ConfigError(f"{type(hf).__name__} has no linear layers, so it cannot have adapters.")
    compute_unfused(hf)
    hf.requires_grad_(False)
    _without_dropout(hf)
    slots = {}
    for name in names:
        base = hf.get_submodule(name)
        assert isinstance(base, nn.Linear)
        slots[name] = SlotLinear(base, is_head=base is head).train(base.training)
        parent_name, _, child = name.rpartition(".")
        setattr(hf.get_submodule(parent_name), child, slots[name])
    return AdapterSlots(slots)


def _without_dropout(hf: PreTrainedModel) -> None:
    """Disable dropout, whose random numbers would depend on the passes before."""
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout_p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def slot_names(hf: PreTrainedModel) -> list[str]:
    """Return the names of the layers that adapters may have: `linear_names`, and the output head if it is linear."""
    head = hf.get_output_embeddings()
    return linear_names(hf) + [name for name, module in hf.named_modules() if module is head and _is_linear(module)]


def slot_sizes(config: PretrainedConfig, *, with_head: bool = True) -> dict[str, int]:
    """Return the layers that adapters of a model may have, with their numbers of inputs and outputs together."""
    with torch.device("meta"), no_init_weights():
        hf: PreTrainedModel = auto_class(config).from_config(deepcopy(config))
    names = slot_names(hf) if with_head else linear_names(hf)
    layers = {name: hf.get_submodule(name) for name in names}
    return {name: one.in_features + one.out_features for name, one in layers.items() if isinstance(one, nn.Linear)}


def linear_names(hf: PreTrainedModel) -> list[str]:
    """Return the names of plain linear layers, except those of modules for images or sound.

    The output head is also left out, because its weight is used in chunks and its forward is not called. So are other
    layers whose forward is not called (`mixers.is_used_by_weight`), and the head of a sequence classifier, which is
    trained as a whole.
    """
    others = {id(module) for part in parts_without_text(hf) for module in part.modules()} | {
        id(hf.get_output_embeddings()),
        id(score_head(hf)),
    }
    linear = [(name, module) for name, module in hf.named_modules() if _is_linear(module)]
    return [name for name, module in linear if id(module) not in others and not is_used_by_weight(name, module)]


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear
