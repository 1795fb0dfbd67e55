"""`import_hf_to_megatron.py` keeps every bit of a hub model, back by `convert_megatron_to_hf.py` or onto a mesh."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_models import Mesh, Run
from rank_backend import without_groups
from rank_host import needs_megatron
from safetensors.torch import load_file, save_file
from small_models import MODELS, VOCAB, hf_model
from tiny_models import make_char_tokenizer
from torch import Tensor

from nemo_rl.host import waiting_log
from nemo_rl.launch.checks import logs_of_library
from nemo_rl.models.training.interfaces import CheckpointPaths

pytestmark = needs_megatron

CONVERTERS = Path(__file__).resolve().parents[5] / "examples/converters"
MESHES = {
    "llama": Mesh(tp=2, sp=True),
    "qwen2": Mesh("qwen2", pp=2),
    "qwen3_moe": Mesh("qwen3_moe", ep=2),
}


def script(name: str, *arguments: object) -> int:
    sys.path.insert(0, str(CONVERTERS))
    return int(importlib.import_module(name).main([str(one) for one in arguments]))


def import_model(folder: Path, target: Path, *arguments: object) -> int:
    given = ["--hf-model-name", folder, "--megatron-ckpt-path", target]
    return script("import_hf_to_megatron", *given, *arguments)


def export_model(folder: Path, target: Path) -> int:
    return script("convert_megatron_to_hf", "--megatron-ckpt-path", folder, "--hf-ckpt-path", target)


def hub(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    same = one.keys() & other.keys()
    return sorted(one.keys() ^ other.keys()) + [
        n for n in same if one[n].dtype != other[n].dtype or not torch.equal(one[n], other[n])
    ]


@contextmanager
def each_look_is_a_line() -> Iterator[list[str]]:
    """Collect the lines about waits in a block; each time that a wait is looked at has one."""
    before, waiting_log.PERIOD_S = waiting_log.PERIOD_S, 0.0
    try:
        with logs_of_library() as records:
            lines: list[str] = []
            yield lines
            lines += [record.getMessage() for record in records]
    finally:
        waiting_log.PERIOD_S = before


def on_one_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with without_groups():
        for name in [*MODELS, "reward"]:
            source, target, back = (folder / kind / name for kind in ("hf", "megatron", "back"))
            assert import_model(source, target) == 0
            assert export_model(target, back) == 0
            found[name] = different(hub(source), hub(back))
        with each_look_is_a_line() as lines:
            assert import_model(folder / "hf/llama", folder / "half", "--dtype", "bfloat16") == 0
            assert export_model(folder / "half", folder / "16") == 0
        found["progress"] = lines
        rounded = {name: tensor.bfloat16() for name, tensor in hub(folder / "hf/llama").items()}
        found["rounded"] = different(rounded, hub(folder / "16"))
        damaged = ("lacks", "has more", "other shape")
        found["status"] = {name: import_model(folder / "hf" / name, folder / name) for name in damaged}
        found["again"] = import_model(folder / "hf/llama", folder / "half")
    return found


def on_two_ranks(rank: int, world: int, folder: Path) -> dict[str, list[str]]:
    found = {}
    for name, mesh in MESHES.items():
        run = Run(mesh, seed=5)  # with other weights
        run.backend.load(CheckpointPaths(folder / "megatron" / name / "policy/weights"))
        sent = {key: tensor.clone() for key, tensor in run.backend.iterate_weights()}
        found[name] = different(sent, hub(folder / "hf" / name))
        run.update(0)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("import")
    for name in MODELS:
        layers = {"num_hidden_layers": 2} if name in MESHES else {}
        hf_model(name, **layers).save_pretrained(made / "hf" / name)
        make_char_tokenizer().save_pretrained(made / "hf" / name)
    hf_model("llama", scores=True).save_pretrained(made / "hf/reward")
    make_char_tokenizer().save_pretrained(made / "hf/reward")
    tensors = hub(made / "hf/llama")
    norm = "model.norm.weight"
    others = {
        "lacks": {n: t for n, t in tensors.items() if n != norm},
        "has more": tensors | {"model.layers.0.self_attn.further.weight": torch.ones(3)},
        "other shape": tensors | {norm: torch.ones(VOCAB + 1)},
    }
    for name, changed in others.items():
        (made / "hf" / name).mkdir()
        save_file(changed, made / "hf" / name / "model.safetensors")
        (made / "hf" / name / "config.json").write_text((made / "hf/llama/config.json").read_text())
    return made


@pytest.fixture(scope="module")
def found(host: Any, folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = host.run(on_one_rank, 1, folder)[0]
    return result


@pytest.mark.parametrize("name", [*MODELS, "reward", "rounded"])
def test_an_imported_model_exports_bit_for_bit(found: dict[str, Any], name: str) -> None:
    assert found[name] == []


@pytest.mark.parametrize("written", ["half/policy/weights", "16"])
def test_progress_counts_every_tensor(found: dict[str, Any], folder: Path, written: str) -> None:
    pattern = rf"the writing of {folder / written} after \d+ s: (\d+) of (\d+) tensors are written"
    counts = [(int(shown[1]), int(shown[2])) for line in found["progress"] if (shown := re.search(pattern, line))]
    total = len(hub(folder / "hf/llama"))
    assert counts[0][0] <= 2 and counts[-1] == (total, total)
    assert counts == sorted(counts) and len(set(counts)) > total / 2


def test_files_of_another_model_and_folders_in_use_are_refused(found: dict[str, Any], folder: Path) -> None:
    assert set(found["status"].values()) == {1} and found["again"] == 1
    assert not (folder / "lacks").exists()


def test_a_mesh_starts_from_the_imported_weights(host: Any, found: dict[str, Any], folder: Path) -> None:
    for rank in host.run(on_two_ranks, 2, folder):
        assert rank == {name: [] for name in MESHES}


def test_the_folder_records_its_source_files(found: dict[str, Any], folder: Path) -> None:
    described = json.loads((folder / "megatron/llama/manifest.json").read_text())["files"]
    assert {"config.yaml", "policy/weights/config.json", "policy/weights/iter_0000000/.metadata"} <= described.keys()
    assert not dist.is_initialized()
