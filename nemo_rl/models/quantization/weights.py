"""Choose the weights of a model that engines get in float8, and what is sent in place of each.

Linear layers of decoder layers are quantized: projections of attention and of feed-forward networks, also those of
experts. Embeddings, output heads, norms, biases and routers are not, as in DeepSeek-V3. Invariant: what is sent depends
on name and shape alone, so all trainer ranks agree on it.
"""

import re
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from nemo_rl.models.quantization.blocks import FP8_ACTIVATIONS, BlockFormat, quantize, rounded

_MATRIX_OF_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:.*\.)?(?:\w+_proj(?:_with_mqa)?|w[123])\.weight")
"""Names of weights in hub checkpoints; the group is the number of the layer."""


@dataclass(frozen=True)
class WeightQuantization:
    """Quantizes weights for engines; see `weight_sync.encoding.Encoding`."""

    block_format: BlockFormat
    """Format of the matrices."""
    num_layers: int
    """Number of layers of the model."""
    first_layers: int = 0
    """Layers at its beginning that are not quantized."""
    last_layers: int = 0
    """Layers at its end that are not quantized."""
    ignored: tuple[str, ...] = ()
    """Texts; weights whose name contains one are not quantized."""
    activation_format: BlockFormat = FP8_ACTIVATIONS
    """Format of the inputs of quantized layers."""
    simulated: bool = False
    """Whether engines get the rounded values in their former dtype, in place of float8 values and scales."""

    @property
    def scale_suffix(self) -> str:
        """Ending of the name of a tensor of scales, as in the checkpoints that vLLM reads."""
        return "_scale" if self.block_format.scales == "e8m0" else "_scale_inv"

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether a weight is quantized."""
        found = _MATRIX_OF_LAYER.fullmatch(name)
        if found is None or len(shape) != 2 or any(text in name for text in self.ignored):
            return False
        return self.first_layers <= int(found[1]) < self.num_layers - self.last_layers

    def described(self, name: str, dtype: str, shape: tuple[int, ...]) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return name, dtype and shape of each tensor that is sent for a weight."""
        if self.simulated or not self.takes(name, shape):
            return [(name, dtype, shape)]
        scales = str(self.block_format.scale_dtype).removeprefix("torch.")
        values = str(torch.float8_e4m3fn).removeprefix("torch.")
        return [(name, values, shape), (name + self.scale_suffix, scales, self.block_format.grid(shape))]

    def bytes_of(self, name: str, shape: tuple[int, ...], itemsize: int) -> int:
        """Return the bytes of a parameter in an engine.

        Args:
            name: name in a model of transformers; experts may be one parameter `[E, rows, columns]`.
            shape: of the parameter.
            itemsize: bytes of a number that is not quantized.
        """
        matrix = shape[-2:]
        of_each = name if name.endswith(".weight") else f"{name}.weight"
        if self.simulated or not self.takes(of_each, matrix):
            return prod(shape) * itemsize
        scales = prod(shape[:-2]) * prod(self.block_format.grid(matrix))
        return prod(shape) + scales * self.block_format.scale_dtype.itemsize

    def encode(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Return the tensors that are sent for a weight, in the order of `described`."""
        if not self.takes(name, tuple(tensor.shape)):
            return [tensor]
        if self.simulated:
            return [rounded(tensor, self.block_format)]
        return list(quantize(tensor, self.block_format))
