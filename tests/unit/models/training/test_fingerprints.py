"""Fingerprints of tensors: of pieces and wholes, of equal and of close elements."""

import itertools

import pytest
import torch

from nemo_rl.distributed.ranks.tensor_block import TensorBlock, whole_block
from nemo_rl.models.training.tensor_checks import Fingerprint, added, fingerprint, fingerprints_here, joined


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("splits", [((0, 3), (3, 7), (7, 7)), ((0, 7),)])
def test_pieces_of_rows_and_columns_add_up_to_the_whole(
    dtype: torch.dtype, splits: tuple[tuple[int, int], ...]
) -> None:
    whole = tensor(7, 6, 5, dtype=dtype)
    want = fingerprint(whole)
    blocks = [
        TensorBlock((start, first, 0), (stop - start, last - first, 5))
        for (start, stop), (first, last) in itertools.product(splits, [(0, 2), (2, 6)])
    ]
    got = added(fingerprint(block.of(whole), whole.shape, block) for block in blocks)
    assert got.checksum == want.checksum
    assert got.square_sum == pytest.approx(float(whole.double().square().sum()))
    assert got.sketch == pytest.approx(want.sketch)


def test_long_tensors_are_the_sum_of_their_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tensor(13, 11)
    want = fingerprint(whole)
    monkeypatch.setattr("nemo_rl.models.training.tensor_checks._CHUNK", 10)
    got = fingerprint(whole)
    assert (got.checksum, got.sketch) == (want.checksum, pytest.approx(want.sketch))


def test_any_changed_bit_and_any_exchange_changes_the_checksum() -> None:
    values = tensor(64)
    want = fingerprint(values).checksum
    for place in range(64):
        changed = values.clone()
        changed.view(torch.int32)[place] ^= 1
        assert fingerprint(changed).checksum != want
    exchanged = values.clone()
    exchanged[[3, 40]] = values[[40, 3]]
    assert fingerprint(exchanged).checksum != want
    assert fingerprint(-values * 0).checksum != fingerprint(values * 0).checksum


def test_the_distance_is_that_of_the_tensors_within_a_small_factor() -> None:
    values = tensor(4000)
    for seed, size in enumerate([1e-6, 1e-3, 1.0] * 10):
        other = values + size * tensor(4000, seed=seed + 1)
        true = float((other.double() - values.double()).norm())
        assert 0.2 < fingerprint(values).distance(fingerprint(other)) / true < 3.0
    assert fingerprint(values).distance(fingerprint(values.clone())) == 0.0
    assert fingerprint(values).distance(fingerprint(values * float("nan"))) == float("inf")


def test_a_piece_that_several_ranks_hold_counts_once() -> None:
    whole = tensor(4, 2)
    blocks = TensorBlock((0, 0), (2, 2)), TensorBlock((2, 0), (2, 2))
    half, rest = ((block, fingerprint(block.of(whole), whole.shape, block)) for block in blocks)
    assert joined([{"w": half}, {"w": rest}, {"w": half}, {}])["w"].checksum == fingerprint(whole).checksum


def test_plain_tensors_are_whole_and_empty_ones_have_no_piece() -> None:
    found = fingerprints_here({"w": tensor(3), "none": torch.empty(0)})
    assert found == {"w": (whole_block((3,)), fingerprint(tensor(3)))}


def test_plain_values_hold_all_bits() -> None:
    prints = fingerprint(tensor(9))
    assert Fingerprint.from_json(prints.as_json()) == prints
