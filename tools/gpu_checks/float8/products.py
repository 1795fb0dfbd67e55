"""Check quantization to float8 on the device, and measure the error of products of quantized matrices."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_checks.bench import Bench
from gpu_checks.report import Figures, Finding
from nemo_rl.models.quantization import (
    FP8_ACTIVATIONS,
    FP8_WEIGHTS,
    MXFP8,
    BlockFormat,
    Quantized,
    dequantize,
    quantize,
)

_SIZES, _CPU_SIZES = (4096, 4096, 4096), (96, 256, 256)
"""Rows of activations, inputs and outputs of the layer."""
_MOST_ERROR = 0.06
"""Each factor is within 1/17 of its value, and random errors of a sum are smaller."""
_MOST_KERNEL_ERROR = 0.01
"""Of a kernel with bfloat16 results, against the same quantized factors."""
_FORMATS: dict[str, tuple[BlockFormat, BlockFormat]] = {
    "fp8 blocks": (FP8_ACTIVATIONS, FP8_WEIGHTS),
    "MXFP8": (MXFP8, MXFP8),
}


def blocks(bench: Bench) -> Iterator[Finding]:
    """Check a layer's product in each format; the device's kernel for float8 blocks is measured where it has one."""
    rows, inputs, outputs = _SIZES if bench.on_gpu else _CPU_SIZES
    generator = torch.Generator().manual_seed(4)
    activations = torch.randn(rows, inputs, generator=generator).bfloat16().to(bench.device)
    weight = (torch.randn(outputs, inputs, generator=generator) * 0.02).bfloat16().to(bench.device)
    exact = activations.double() @ weight.double().t()
    for name, (of_activations, of_weight) in _FORMATS.items():
        left, right = quantize(activations, of_activations), quantize(weight, of_weight)
        on_cpu = quantize(weight.cpu(), of_weight)
        same = right.values.cpu().view(torch.uint8).equal(on_cpu.values.view(torch.uint8))
        same = same and right.scales.cpu().equal(on_cpu.scales)
        product = _dequantized_product(left, of_activations, right, of_weight)
        error = _relative(product, exact)
        figures: Figures = {"error": error, "allowed": _MOST_ERROR}
        problem = "" if same else "the device quantizes other values than the CPU. "
        problem += "" if error <= _MOST_ERROR else "the product is farther from float64 than allowed. "
        if name == "fp8 blocks" and bench.on_gpu:
            kernel, figures["kernel"] = _kernel_product(left, right)
            if kernel is not None:
                figures["kernel_error"] = error = _relative(kernel, product)
                problem += "" if error <= _MOST_KERNEL_ERROR else "the kernel multiplies other numbers."
        yield Finding(name, figures, problem.strip())


def _dequantized_product(left: Quantized, of_left: BlockFormat, right: Quantized, of_right: BlockFormat) -> Tensor:
    return dequantize(left, of_left, torch.float64) @ dequantize(right, of_right, torch.float64).t()


def _kernel_product(left: Quantized, right: Quantized) -> tuple[Tensor | None, str]:
    """Return the product by PyTorch's kernel for these blocks, or None where it has none, and a remark."""
    recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    by_columns = left.scales.t().contiguous().t()  # the kernel reads a column of scales after another
    try:
        found = F.scaled_mm(left.values, right.values.t(), by_columns, recipes[0], right.scales.t(), recipes[1])
    except (RuntimeError, ValueError, NotImplementedError) as refusal:
        return None, f"none: {str(refusal).splitlines()[0][:60]}"
    return found, "scaled_mm"


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())
