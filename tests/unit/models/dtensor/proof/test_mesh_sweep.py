"""Model types on meshes: each cell equals transformers' own float64, or is refused before a rank starts."""

import pytest
import torch
from mesh_sweep import GOOD, MESHES, sweep
from parity.every_type import model_types

SOME = [
    ("granite", "pp2", "right"),
    ("olmo", "pp2", "right"),
    ("qwen2_moe", "tp2", "right"),
    ("qwen2_moe", "tp2ep2", "right"),
    ("minimax", "tp2sp", "right"),
    ("minimax", "cp2", "refused"),
    ("llama4_text", "tp2", "right"),
    ("llama4_text", "tp2sp", "refused"),
    ("gemma4_text", "tp2sp", "right"),
    ("deepseek_v4", "ep2", "right"),
    ("deepseek_v4", "pp2", "refused"),
    ("axk1", "tp2", "right"),
    ("longcat_flash", "tp2sp", "right"),
    ("qwen3_moe", "pp2tp2", "right"),
    ("phi3", "cp2tp2", "right"),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.set_num_threads(1)


@pytest.mark.parametrize(("model_type", "mesh", "expected"), SOME)
def test_each_model_and_mesh_is_correct_or_refused(model_type, mesh, expected) -> None:
    (cell,) = sweep(model_type, [mesh])
    assert cell.result == expected, cell


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model_type", model_types())
def test_every_model_type_is_correct_or_refused_on_every_mesh(model_type) -> None:
    try:
        cells = list(sweep(model_type, list(MESHES)))
    except ValueError as error:
        pytest.skip(f"no small model of this type: {error}")
    assert not [cell for cell in cells if cell.result not in GOOD]
