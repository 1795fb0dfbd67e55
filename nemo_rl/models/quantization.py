"""Quantize weights to float8 in scaled blocks, and decide which weights engines get in float8.

Matrices are quantized to float8 (e4m3) with one scale for each block of values. Sources: blocks of 128 x 128 weights
and of 1 x 128 activations, DeepSeek-V3 technical report, arXiv 2412.19437, section 3.3; MXFP8, OCP Microscaling Formats
(MX) 1.0, section 5.2 (blocks of 32 along a row, scales in e8m0). The scale of a block is its largest magnitude divided
by 448, the largest number of e4m3, so no value is clipped. Scales that are powers of two are rounded up. The MX
specification rounds them down and clips values, but the kernels of NVIDIA round up. Invariant: a matrix of zeros stays
zero, and every scale is finite and above zero.

`WeightQuantization` decides, from the configuration, which weights are quantized, and encodes them. Linear layers of
decoder layers are quantized: projections of attention and of feed-forward networks, including those of experts.
Embeddings, output heads, norms, biases and routers are not, as in DeepSeek-V3. Invariant: the decision depends only on
the name and shape of a weight, so all trainer ranks agree.
"""

import re
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.models.draft.shape import PREFIX
from nemo_rl.models.huggingface.load import load_model_config

_E4M3_MAX = 448.0
_LEAST_MAGNITUDE = 1e-4
"""Smallest magnitude for which a float32 scale is computed, as in DeepGEMM and vLLM. Blocks of zeros need it."""
_LEAST_NORMAL = torch.finfo(torch.float32).tiny
_EXPONENT_BIAS = 127
_MOST_EXPONENT = 254
"""Largest exponent of e8m0 that represents a number. 255 is NaN."""


@dataclass(frozen=True)
class BlockFormat:
    """A format of float8 values in blocks."""

    rows: int
    """Number of rows of a block."""
    columns: int
    """Number of columns of a block."""
    scales: Literal["float32", "power_of_two", "e8m0"] = "float32"
    """Kind of the scales: "float32" for exact scales, "power_of_two" for float32 scales rounded up to a power of two,
    or "e8m0" for the exponent of that power plus 127, as uint8."""

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the number of blocks of a matrix in each direction. The last block may be cut off."""
        num_rows, num_columns = shape
        return -(-num_rows // self.rows), -(-num_columns // self.columns)

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the tensor of scales."""
        return torch.uint8 if self.scales == "e8m0" else torch.float32


FP8_WEIGHTS = BlockFormat(128, 128)
"""DeepSeek-V3's format of weights."""
FP8_ACTIVATIONS = BlockFormat(1, 128)
"""DeepSeek-V3's format of activations."""
MXFP8 = BlockFormat(1, 32, "e8m0")


class Quantized(NamedTuple):
    """A quantized matrix."""

    values: Tensor
    """`[R, C]` float8_e4m3fn."""
    scales: Tensor
    """One scale for each block of `BlockFormat.grid`. A represented number is its value times its block's scale."""


def quantize(matrix: Tensor, block_format: BlockFormat) -> Quantized:
    """Round a matrix to float8.

    Args:
        matrix: `[R, C]`, any floating-point dtype, finite.
        block_format: Format of blocks and scales. The blocks need not divide the matrix evenly.

    Raises:
        ValueError: The tensor is not a matrix.
    """
    if matrix.ndim != 2:
        raise ValueError(f"Blocks are parts of matrices, and this tensor has the shape {tuple(matrix.shape)}.")
    blocks = _in_blocks(matrix, block_format)
    magnitudes = blocks.abs().amax(dim=(1, 3), keepdim=True).float()
    if block_format.scales == "float32":
        scales = sent = magnitudes.clamp(min=_LEAST_MAGNITUDE) / _E4M3_MAX
    else:
        is_e8m0 = block_format.scales == "e8m0"
        least = _LEAST_NORMAL if is_e8m0 else _LEAST_MAGNITUDE
        exponents = _exponents_above(magnitudes.clamp(min=least) / _E4M3_MAX)
        scales = torch.ldexp(torch.ones_like(magnitudes), exponents)
        sent = exponents + _EXPONENT_BIAS if is_e8m0 else scales
    # As in the kernels, values are multiplied by the reciprocal. The result may differ from a quotient in the last bit.
    values = (blocks.float() * (1.0 / scales)).to(torch.float8_e4m3fn)
    grid = block_format.grid(matrix.shape)
    return Quantized(_without_padding(values, matrix.shape), sent.to(block_format.scale_dtype).view(grid))


def dequantize(quantized: Quantized, block_format: BlockFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the matrix `[R, C]` that a quantized matrix represents, computed in float32 and rounded to `dtype`."""
    values, scales = quantized
    if block_format.scales == "e8m0":
        scales = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - _EXPONENT_BIAS)
    blocks = _in_blocks(values.float(), block_format) * scales[:, None, :, None]
    return _without_padding(blocks, values.shape).to(dtype)


def rounded(matrix: Tensor, block_format: BlockFormat) -> Tensor:
    """Quantize a matrix and dequantize it again to its own dtype."""
    return dequantize(quantize(matrix, block_format), block_format, matrix.dtype)


def _in_blocks(matrix: Tensor, block_format: BlockFormat) -> Tensor:
    """Return the matrix as `[grid rows, rows, grid columns, columns]`, padded with zeros."""
    (num_rows, num_columns), grid = matrix.shape, block_format.grid(matrix.shape)
    below, right = grid[0] * block_format.rows - num_rows, grid[1] * block_format.columns - num_columns
    padded = F.pad(matrix, (0, right, 0, below)) if below or right else matrix
    return padded.reshape(grid[0], block_format.rows, grid[1], block_format.columns)


def _without_padding(blocks: Tensor, shape: torch.Size) -> Tensor:
    matrix = blocks.reshape(blocks.shape[0] * blocks.shape[1], blocks.shape[2] * blocks.shape[3])
    return matrix[: shape[0], : shape[1]].contiguous()


def _exponents_above(scales: Tensor) -> Tensor:
    """Return the smallest n with `2^n >= scale` within the range of e8m0. It is exact, without a rounded logarithm."""
    fractions, exponents = torch.frexp(scales)  # fractions are in [0.5, 1)
    exponents = exponents - (fractions == 0.5).int()
    return exponents.clamp(-_EXPONENT_BIAS + 1, _MOST_EXPONENT - _EXPONENT_BIAS)


_MATRIX_OF_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:.*\.)?(?:\w+_proj(?:_with_mqa)?|w[123])\.weight")
"""Pattern of weight names in hub checkpoints. Its group is the layer number."""


@dataclass(frozen=True)
class WeightQuantization:
    """Quantize weights for engines (`weight_sync.exchange.Encoding`)."""

    block_format: BlockFormat
    """Format of the matrices."""
    num_layers: int
    """Number of layers of the model."""
    first_layers: int = 0
    """Number of layers at the start of the model that are not quantized."""
    last_layers: int = 0
    """Number of layers at the end of the model that are not quantized."""
    ignored: tuple[str, ...] = ()
    """Texts of weights that are not quantized: those whose name contains one of the texts."""
    activation_format: BlockFormat = FP8_ACTIVATIONS
    """Format of the inputs of quantized layers."""
    simulated: bool = False
    """Whether engines get rounded values in the original dtype instead of float8 values and scales."""

    @property
    def scale_suffix(self) -> str:
        """Suffix of the names of scales, as in the checkpoints that vLLM reads."""
        return "_scale" if self.block_format.scales == "e8m0" else "_scale_inv"

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether a weight is quantized."""
        found = _MATRIX_OF_LAYER.fullmatch(name)
        if found is None or len(shape) != 2 or any(text in name for text in self.ignored):
            return False
        return self.first_layers <= int(found[1]) < self.num_layers - self.last_layers

    def described(self, name: str, dtype: str, shape: tuple[int, ...]) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return name, dtype and shape of each tensor sent for a weight."""
        if self.simulated or not self.takes(name, shape):
            return [(name, dtype, shape)]
        scales = str(self.block_format.scale_dtype).removeprefix("torch.")
        values = str(torch.float8_e4m3fn).removeprefix("torch.")
        return [(name, values, shape), (name + self.scale_suffix, scales, self.block_format.grid(shape))]

    def bytes_of(self, name: str, shape: tuple[int, ...], itemsize: int) -> int:
        """Return the number of bytes of a parameter in an engine.

        Args:
            name: Name in a model of transformers. Experts may be a single parameter `[E, rows, columns]`.
            shape: Shape of the parameter.
            itemsize: Number of bytes of an element that is not quantized.
        """
        matrix = shape[-2:]
        of_each = name if name.endswith(".weight") else f"{name}.weight"
        if self.simulated or not self.takes(of_each, matrix):
            return prod(shape) * itemsize
        scales = prod(shape[:-2]) * prod(self.block_format.grid(matrix))
        return prod(shape) + scales * self.block_format.scale_dtype.itemsize

    def encode(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Return the tensors sent for a weight, in the order of `described`."""
        if not self.takes(name, tuple(tensor.shape)):
            return [tensor]
        if self.simulated:
            return [rounded(tensor, self.block_format)]
        return list(quantize(tensor, self.block_format))


FP8 = "fp8"
SIMULATED = (
    "policy.generation.vllm_cfg.precision=fp8 on CPUs is simulated: weights are rounded to float8 at each sync, and in "
    "vLLM the inputs of their layers too. All is computed in policy.precision, which takes longer than without fp8."
)


def weight_quantization(policy: PolicyConfig, cluster: ClusterConfig) -> WeightQuantization | None:
    """Return how the engines' weights are quantized, or None if `policy.generation` does not use float8.

    vLLM's CPU build multiplies float8 matrices only on processors with AMX, so on CPUs float8 is simulated.
    """
    generation = policy.generation
    if generation is None or generation.engine.precision != FP8:
        return None
    wanted = generation.vllm_cfg
    weights, activations = MXFP8, MXFP8
    if not wanted.is_mx:
        weights = _with_scales(FP8_WEIGHTS, wanted.pow2_weight_scaling_factors)
        activations = _with_scales(FP8_ACTIVATIONS, wanted.pow2_activation_scaling_factors)
    model = load_model_config(policy.model_name, policy.hf_config_overrides).get_text_config()
    return WeightQuantization(
        block_format=weights,
        num_layers=model.num_hidden_layers,
        first_layers=wanted.num_first_layers_in_bf16,
        last_layers=wanted.num_last_layers_in_bf16,
        ignored=(*wanted.quantization_ignored_layer_kws, *((PREFIX,) if policy.draft.enabled else ())),
        activation_format=activations,
        simulated=not cluster.uses_gpu,
    )


def _with_scales(block_format: BlockFormat, powers_of_two: bool) -> BlockFormat:
    return replace(block_format, scales="power_of_two") if powers_of_two else block_format
