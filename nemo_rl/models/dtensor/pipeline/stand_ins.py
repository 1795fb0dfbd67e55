"""Stand in for the layers that a chunk of a pipeline does not compute.

The body's forward calls every layer of its list. Some bodies choose a layer's mask by an attribute of the layer, and
some layers return a tuple. Invariant: a stand-in has the plain attributes of the layer that it replaces, and returns
its input in the form in which the layer returns its output.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from nemo_rl.models.huggingface.layers import decoder_layers, first_tensor, hidden_states

_STAND_INS, _OUTPUTS = "_pipeline_stand_ins", "_pipeline_layer_outputs"


class PassThrough(nn.Module):
    """Module in place of a layer or norm of another chunk, which returns its input.

    Args:
        outputs: length of the tuple that it returns, whose other items are None. If None, it returns a tensor.
    """

    def __init__(self, outputs: int | None = None) -> None:
        super().__init__()
        self._outputs = outputs

    @classmethod
    def instead_of(cls, layer: nn.Module, outputs: int | None) -> "PassThrough":
        """Return a stand-in with the plain attributes of a layer."""
        made = cls(outputs)
        for name, value in vars(layer).items():
            if isinstance(value, str | bool | int | float) and not name.startswith("_") and name != "training":
                setattr(made, name, value)
        return made

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states `[b, T, D]`, in the form in which a layer returns them."""
        if self._outputs is None:
            return hidden_states
        return (hidden_states, *[None] * (self._outputs - 1))


class Through(nn.Module):
    """Wrap the first or last layer of the list, to insert received hidden states and keep the output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = [layer]
        self.arrived: Tensor | None = None
        self.left: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the layer, because some models choose a layer's mask by an attribute."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"][0], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the layer with the hidden states `[b, T, D]` that have arrived, if any, or with those of the body."""
        given = hidden_states if self.arrived is None else self.arrived
        output = self._layer[0](given, *args, **kwargs)
        self.left = first_tensor(output)
        return output


def stand_ins(hf: PreTrainedModel) -> Sequence[PassThrough]:
    """Return a stand-in for each layer of a whole model, or those that `keep_stand_ins` made for a stage."""
    kept: Sequence[PassThrough] | None = getattr(hf, _STAND_INS, None)
    if kept is not None:
        return kept
    return [PassThrough.instead_of(layer, outputs_of_layers(hf)) for layer in decoder_layers(hf)]


def keep_stand_ins(hf: PreTrainedModel) -> None:
    """Make the stand-ins of a whole model, before layers are removed from it."""
    setattr(hf, _STAND_INS, stand_ins(hf))


def outputs_of_layers(hf: PreTrainedModel) -> int | None:
    """Return the length of the tuples that layers return, or None if they return tensors or if this is not known."""
    number: int | None = getattr(hf, _OUTPUTS, None)
    return number


def set_outputs_of_layers(hf: PreTrainedModel, number: int | None) -> None:
    """Set what `outputs_of_layers` returns, because a model without weights cannot be tried."""
    setattr(hf, _OUTPUTS, number)


def hidden_states_of_whole(hf: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the body's output `[b, T, D]` for tokens `[b, T]` of a whole model, and set `outputs_of_layers`."""
    numbers: set[int | None] = set()

    def see(module: nn.Module, args: Any, output: Any) -> None:
        numbers.add(len(output) if isinstance(output, tuple) else None)

    handles = [layer.register_forward_hook(see) for layer in decoder_layers(hf)]
    try:
        hidden = hidden_states(hf, {"input_ids": tokens})
    finally:
        for handle in handles:
            handle.remove()
    set_outputs_of_layers(hf, numbers.pop() if len(numbers) == 1 else None)
    return hidden
