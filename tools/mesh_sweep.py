"""Test model types on meshes: each must be right, or refused before the ranks start.

    python tools/mesh_sweep.py [--types llama,olmo] [--meshes tp2,pp2] [--part 1/4] [--rows packed] [--out FILE]
    python tools/mesh_sweep.py --variant SEED      # other sizes and options of each type (`parity.variants`)
    python tools/mesh_sweep.py --named             # options of published models (`parity.families`)

Every causal language model type of the installed transformers is built small, checked as a run checks it before Ray
starts, and, if accepted, trained for one update by the training backend on real gloo ranks. The result is compared with
transformers' own model in float64 in one process (`parity.reference`), which shares no code with the check. The tool
prints one line for each cell and exits with 1 if a cell is wrong, crashed, or refused only by its ranks. Cells that
`--out` already has are counted and not run again, so a sweep can be stopped and started again.

Ranks compute in float32 as in a run. If the difference exceeds the tolerance, which for some architectures rounding
alone does, they compute again in float64, and that result counts.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from parity.compare import difference
from parity.every_type import model_types, save_tiny_model
from parity.families import FAMILIES
from parity.quiet import be_quiet
from parity.ranks import mesh_numbers, policy_config
from parity.reference import Numbers, one_process

from nemo_rl.models.dtensor.training_backend import DTensorTraining
from nemo_rl.utils.errors import ConfigError

TOLERANCE = 1e-5
_TP, _SP = {"tensor_parallel_size": 2}, {"sequence_parallel": True}
_CP, _PP, _EP = {"context_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"expert_parallel_size": 2}
MESHES: dict[str, tuple[dict[str, Any], int]] = {
    "1": ({}, 1),
    "tp2": (_TP, 2),
    "tp2sp": (_TP | _SP, 2),
    "cp2": (_CP, 2),
    "pp2": (_PP, 2),
    "ep2": (_EP, 2),
    "pp2tp2": (_PP | _TP, 4),
    "cp2tp2": (_CP | _TP, 4),
    "tp2ep2": (_TP | _EP, 2),
}
"""Keys of `policy.dtensor_cfg`, and number of ranks."""
GOOD = ("right", "refused")


@dataclass(frozen=True)
class Cell:
    """Result of one model type on one mesh.

    Attributes:
        model_type: name of the type.
        mesh: key of `MESHES`.
        rows: `padded` or `packed`.
        result: `right`, `refused`, or a fault: `wrong`, `crashed`, `refused late`.
        told: the difference, or the message.
        check_s: seconds of the check.
        seed: seed of a drawn variant, or None for the usual sizes.
        named: name of a variant of the type, or "".
    """

    model_type: str
    mesh: str
    rows: str
    result: str
    told: str
    check_s: float
    seed: int | None = None
    named: str = ""


def sweep(
    model_type: str,
    meshes: list[str],
    *,
    packed: bool = False,
    judged: bool = True,
    seed: int | None = None,
    named: str = "",
) -> Iterator[Cell]:
    """Yield the cells of one model type.

    Args:
        model_type: name of the type.
        meshes: keys of `MESHES`.
        packed: pack rows instead of padding them.
        judged: run accepted meshes; otherwise their result is `accepted`.
        seed: of a drawn variant (`parity.variants`); the usual sizes by default.
        named: name of a variant (`parity.families`).

    Raises:
        ValueError: no small model of the type can be built.
    """
    with tempfile.TemporaryDirectory(prefix="mesh-sweep-") as folder:
        name = save_tiny_model(model_type, Path(folder) / "model", seed, named)
        judge = _Judge(name)
        rows = "packed" if packed else "padded"
        for mesh in meshes:
            began = time.monotonic()
            asked, ranks = MESHES[mesh]
            policy = policy_config(name, asked, packed=packed)
            try:
                DTensorTraining().check(policy, ranks)
            except ConfigError as error:
                told = str(error).replace(name, model_type)
                yield Cell(model_type, mesh, rows, "refused", told, time.monotonic() - began, seed, named)
                continue
            except Exception as error:  # noqa: BLE001  (such faults are a result of the sweep)
                yield Cell(model_type, mesh, rows, "crashed", repr(error), time.monotonic() - began, seed, named)
                continue
            check_s = time.monotonic() - began
            result = judge.result(asked, ranks, packed) if judged else ("accepted", "")
            yield Cell(model_type, mesh, rows, *result, check_s, seed, named)


class _Judge:
    """Compares the ranks' results with transformers in float64."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._reference: Numbers | None = None

    def result(self, asked: dict[str, Any], ranks: int, packed: bool) -> tuple[str, str]:
        """Run the mesh; return the result and its explanation."""
        told = []
        for dtype in (torch.float32, torch.float64):
            try:
                ours = mesh_numbers(self._name, asked, ranks, packed=packed, steps=1, dtype=dtype)
            except Exception as error:  # noqa: BLE001  (such faults are a result of the sweep)
                late = "ConfigError" in str(error)
                return ("refused late" if late else "crashed"), str(error).strip().splitlines()[-1]
            self._reference = self._reference or one_process(self._name, 1)
            _fill(ours, self._reference)
            found = difference(ours, self._reference)
            told.append(f"{found.largest:.1e}")
            if found.largest <= TOLERANCE:
                return "right", ", in float64 ".join(told)
        return "wrong", f"{', in float64 '.join(told)} {found}"


def _fill(ours: Numbers, theirs: Numbers) -> None:
    """Add zeros for gradients that one side has as zeros and the other side lacks."""
    for mine, other in zip(ours.gradients, theirs.gradients, strict=True):
        for here, there in ((mine, other), (other, mine)):
            for name in there.keys() - here.keys():
                if not bool(there[name].any()):
                    here[name] = torch.zeros_like(there[name])


def main(arguments: list[str] | None = None) -> int:
    """Run the sweep; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="comma-separated; all by default")
    parser.add_argument("--meshes", default=",".join(MESHES), help="comma-separated; all by default")
    parser.add_argument("--part", default="1/1", help="part of the types to run, for example 2/4")
    parser.add_argument("--rows", default="padded,packed", help="comma-separated; both by default")
    parser.add_argument("--variant", type=int, help="seed of other sizes and options")
    parser.add_argument("--named", action="store_true", help="all named variants of the types that have some")
    parser.add_argument("--check-only", action="store_true", help="do not run what the check accepts")
    parser.add_argument("--out", type=Path, help="append one JSON object per line to this file")
    given = parser.parse_args(arguments)
    part, parts = map(int, given.part.split("/"))
    chosen = given.types.split(",") if given.types else model_types()[part - 1 :: parts]
    be_quiet()
    before = _stored(given.out)
    counts = Counter(cell.result for cell in before.values())
    with tempfile.TemporaryDirectory(prefix="mesh-sweep-cache-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for model_type, named in _forms(chosen, named=given.named):
            for cell in _cells(model_type, named, given, before):
                counts[cell.result] += 1
                place = f"{cell.model_type:24} {cell.mesh:8} {cell.rows:7} {cell.named}"
                print(f"{place} {cell.result:10} {cell.check_s:4.1f}s {cell.told[:400]}")
                sys.stdout.flush()
                if given.out:
                    with given.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(cell)) + "\n")
    print(dict(counts))
    return 0 if counts.keys() <= {*GOOD, "accepted", "not built"} else 1


type _Key = tuple[str, str, str, int | None, str]
"""Model type, mesh, rows, and seed and name of the variant of a cell."""


def _forms(types: Sequence[str], *, named: bool) -> Iterator[tuple[str, str]]:
    """Yield the types, each with "" or with the names of its variants."""
    for model_type in types:
        yield from ((model_type, name) for name in (FAMILIES.get(model_type, ()) if named else ("",)))


def _stored(file: Path | None) -> dict[_Key, Cell]:
    if file is None or not file.exists():
        return {}
    cells = [Cell(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    return {(cell.model_type, cell.mesh, cell.rows, cell.seed, cell.named): cell for cell in cells}


def _cells(model_type: str, named: str, given: argparse.Namespace, before: Mapping[_Key, Cell]) -> Iterator[Cell]:
    seed = given.variant
    if (model_type, "-", "-", seed, named) in before:
        return
    for rows in given.rows.split(","):
        meshes = [mesh for mesh in given.meshes.split(",") if (model_type, mesh, rows, seed, named) not in before]
        try:
            judged = not given.check_only
            yield from sweep(model_type, meshes, packed=rows == "packed", judged=judged, seed=seed, named=named)
        except ValueError as error:
            yield Cell(model_type, "-", "-", "not built", str(error), 0.0, seed, named)
            return
        except Exception:  # noqa: BLE001  (one type does not end the sweep)
            told = traceback.format_exc().strip().splitlines()[-1]
            yield Cell(model_type, "-", rows, "crashed", told, 0.0, seed, named)


if __name__ == "__main__":
    raise SystemExit(main())
