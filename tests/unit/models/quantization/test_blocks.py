"""Float8 in blocks against the published definitions, computed in float64 from a table of all 256 values."""

import re

import pytest
import torch
from torch import Tensor

from nemo_rl.config import REPOSITORY_ROOT
from nemo_rl.models.quantization import FP8_ACTIVATIONS, FP8_WEIGHTS, MXFP8, BlockFormat, dequantize, quantize, rounded

POWERS = BlockFormat(128, 128, "power_of_two")
FORMATS = {"blocks": FP8_WEIGHTS, "powers of two": POWERS, "activations": FP8_ACTIVATIONS, "mxfp8": MXFP8}
SMALL = {"square": BlockFormat(4, 6), "powers": BlockFormat(4, 6, "power_of_two"), "mx": BlockFormat(1, 5, "e8m0")}


def gaussian(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return values like a weight's: Gaussian with the deviation 0.02, some rows and columns ten times as large."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator) * 0.02
    matrix[:: max(1, rows // 3)] *= 10
    matrix[:, :: max(1, columns // 2)] *= 10
    return matrix


def e4m3_values() -> Tensor:
    """Return all finite numbers of e4m3, by its definition: 4 bits of exponent (bias 7), 3 of fraction."""
    values = []
    for code in range(256):
        sign, exponent, fraction = (-1) ** (code >> 7), code >> 3 & 0xF, code & 7
        if exponent == 0xF and fraction == 7:
            continue  # NaN; the format has no infinity
        magnitude = (1 + fraction / 8) * 2.0 ** (exponent - 7) if exponent else fraction / 8 * 2.0**-6
        values.append(sign * magnitude)
    return torch.tensor(sorted(set(values)), dtype=torch.float64)


def scale_of_block(block: Tensor, scales: str) -> float:
    """Return the scale of a block by the definition."""
    exact = max(float(block.abs().max()), 1e-4 if scales != "e8m0" else 0.0) / 448
    if scales == "float32":
        return exact
    power = -126
    while 2.0**power < exact:
        power += 1
    return 2.0**power


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("shape", [(8, 30), (7, 11), (1, 1), (3, 5)])
def test_every_value_is_the_nearest_that_its_block_can_hold(name: str, shape: tuple[int, int]) -> None:
    block_format, matrix = SMALL[name], gaussian(*shape)
    quantized = quantize(matrix, block_format)
    assert quantized.values.dtype == torch.float8_e4m3fn and quantized.values.shape == matrix.shape
    assert quantized.scales.shape == block_format.grid(shape)
    got, table, exact = dequantize(quantized, block_format, torch.float64), e4m3_values(), matrix.double()
    for row in range(0, shape[0], block_format.rows):
        for column in range(0, shape[1], block_format.columns):
            part = (slice(row, row + block_format.rows), slice(column, column + block_format.columns))
            scale = scale_of_block(exact[part], block_format.scales)
            nearest = (exact[part].flatten()[:, None] - table * scale).abs().amin(1)
            error = (got[part] - exact[part]).abs().flatten()
            # The scale is a float32 number, so the best value may be missed by its rounding.
            assert (error <= nearest + 4e-7 * exact[part].abs().max()).all()


def test_scales_that_are_powers_of_two_are_the_least_ones_that_clip_nothing() -> None:
    matrix = gaussian(300, 200, seed=1)
    exact, powers = quantize(matrix, FP8_WEIGHTS).scales, quantize(matrix, POWERS).scales
    assert (torch.frexp(powers).mantissa == 0.5).all() and (powers >= exact).all() and (powers < 2 * exact).all()
    scales = quantize(matrix, MXFP8).scales
    assert scales.dtype == torch.uint8 and scales.shape == (300, 7)
    largest = torch.stack([part.abs().amax(1) for part in matrix.split(32, dim=1)], dim=1)
    assert (448 * torch.exp2(scales.double() - 127) >= largest).all()
    assert (224 * torch.exp2(scales.double() - 127) < largest).all()
    on_the_edge = torch.full((1, 32), 448.0)
    assert quantize(on_the_edge, MXFP8).scales.item() == 127 and torch.equal(rounded(on_the_edge, MXFP8), on_the_edge)


@pytest.mark.parametrize("block_format", FORMATS.values(), ids=FORMATS)
def test_odd_values_stay_finite(block_format: BlockFormat) -> None:
    assert torch.equal(rounded(torch.zeros(130, 40), block_format), torch.zeros(130, 40))
    for size in (1e-38, 1e-20, 1e20, 1e38):
        matrix = torch.full((3, 33), size)
        matrix[0, 0] = -size
        got = rounded(matrix, block_format)
        assert got.isfinite().all()
        if size >= 1:
            assert torch.allclose(got, matrix, rtol=0.07)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert rounded(torch.randn(5, 7).to(dtype), block_format).dtype == dtype


@pytest.mark.parametrize("block_format", FORMATS.values(), ids=FORMATS)
def test_what_was_rounded_once_stays_as_it_is(block_format: BlockFormat) -> None:
    once = rounded(gaussian(256, 96, seed=3), block_format)
    assert torch.allclose(rounded(once, block_format), once, rtol=1e-6, atol=0)


def test_only_matrices_have_blocks() -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 3, 4\)"):
        quantize(torch.zeros(2, 3, 4), FP8_WEIGHTS)


def test_files_of_deepseek_hold_the_same_numbers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    quantized = quantize(gaussian(256, 384, seed=4), FP8_WEIGHTS)
    want = Fp8Dequantize(None)._dequantize_one(quantized.values, quantized.scales, torch.float32)
    assert torch.equal(dequantize(quantized, FP8_WEIGHTS), want)


def relative_errors(block_format: BlockFormat | None, matrix: Tensor) -> tuple[float, float]:
    """Return the root-mean-square error of all values but outliers, and the largest error, relative to the values."""
    exact = matrix.double()
    got = matrix.bfloat16() if block_format is None else rounded(matrix, block_format)
    error = got.double() - exact
    usual = exact.abs() < 1
    large = exact.abs() > exact[usual].abs().max() / 64
    return float(error[usual].norm() / exact[usual].norm()), float((error / exact).abs()[large].max())


def test_the_page_s_table_of_errors_is_what_the_formats_have() -> None:
    generator = torch.Generator().manual_seed(7)
    plain = torch.randn(1024, 1024, generator=generator) * 0.02
    outliers = plain.clone()
    outliers[:, ::128] = 0.02 * 100_000
    named = {"bfloat16": None, "fp8, 128 x 128": FP8_WEIGHTS, "fp8, 128 x 128, powers of two": POWERS}
    named |= {"fp8, 1 x 128": FP8_ACTIVATIONS, "MXFP8, 1 x 32": MXFP8, "fp8, one scale": BlockFormat(1024, 1024)}
    lines = []
    for name, block_format in named.items():
        figures = [*relative_errors(block_format, plain), *relative_errors(block_format, outliers)]
        lines.append(f"| {name} | " + " | ".join(f"{100 * value:.2f} %" for value in figures) + " |")
    page = (REPOSITORY_ROOT / "docs/machines/fp8.md").read_text()
    missing = [line for line in lines if line not in page]
    assert not missing, "\n".join(lines)
    assert len(re.findall(r"^\| (?:bfloat16|fp8|MXFP8)", page, re.M)) >= len(lines)
