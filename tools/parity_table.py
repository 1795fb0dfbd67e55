"""Compare every division of a model over ranks with one process, for each architecture; write a table.

        python tools/parity_table.py                                  # everything, on the terminal
    python tools/parity_table.py --only llama qwen3 --meshes tp2  # a part of it
        python tools/parity_table.py --write docs/reference/parity.md # update the page, keep its other cells

Each cell is the largest relative difference of losses, gradients, gradient norm and log-probabilities over two updates
on the CPU from transformers' own model in float64 in one process (`parity.reference`). In float32 it is below 1e-5. In
bfloat16, rounding alone exceeds any fixed limit that would find errors. So one rank is measured too, and a mesh may
differ from float64 by 1.5 times as much. Mixtures then send each token to all experts, because rounding would decide
between two nearly equal experts.
"""

import argparse
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity.compare import Difference, difference
from parity.models import ARCHITECTURES, save_model
from parity.page import drawn, read_table
from parity.ranks import mesh_numbers
from parity.reference import Numbers, one_process
from transformers.utils.logging import disable_progress_bar

LIMIT = 1e-5
"""Limit of the difference in float32."""
BESIDE_ONE_RANK = 1.5
"""Limit in bfloat16, as a multiple of one rank's difference."""
SHOWN = {"float32": ".0e", "bfloat16": ".1e"}
"""Format of the cells of each precision."""
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "dp2": (2, {}),
    "hsdp2x2": (4, {"dp_replicate_size": 2}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "tp2+sp": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "tp4+sp": (4, {"tensor_parallel_size": 4, "sequence_parallel": True}),
    "dp2xtp2": (4, {"tensor_parallel_size": 2}),
    "dp2xtp2+sp": (4, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "cp2": (2, {"context_parallel_size": 2}),
    "cp2-ulysses": (2, {"context_parallel_size": 2, "context_parallel_method": "ulysses"}),
    "dp2xcp2": (4, {"context_parallel_size": 2}),
    "cp2xtp2": (4, {"context_parallel_size": 2, "tensor_parallel_size": 2}),
    "cp2xtp2+sp": (4, {"context_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "pp2-interleaved": (2, {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}),
    "pp4": (4, {"pipeline_parallel_size": 4}),
    "dp2xpp2": (4, {"pipeline_parallel_size": 2}),
    "pp2xtp2": (4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    "pp2xtp2+sp": (4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True}),
    "pp2xcp2": (4, {"pipeline_parallel_size": 2, "context_parallel_size": 2}),
    "ep2": (2, {"expert_parallel_size": 2}),
    "tp2,ep2": (2, {"tensor_parallel_size": 2, "expert_parallel_size": 2}),
    "cp2,ep2": (2, {"context_parallel_size": 2, "expert_parallel_size": 2}),
    "dp4,ep2": (4, {"expert_parallel_size": 2}),
    "dp4,ep4": (4, {"expert_parallel_size": 4}),
    "dp2xtp2,ep2": (4, {"tensor_parallel_size": 2, "expert_parallel_size": 2}),
    "dp2xtp2+sp,ep4": (4, {"tensor_parallel_size": 2, "sequence_parallel": True, "expert_parallel_size": 4}),
    "pp2,ep2": (4, {"pipeline_parallel_size": 2, "expert_parallel_size": 2}),
    "dp2xcp2,ep2": (4, {"context_parallel_size": 2, "expert_parallel_size": 2}),
}
"""Mesh -> number of ranks, and keys of `policy.dtensor_cfg`."""
WITH_EXPERTS = ("qwen3-moe", "deepseek-v3", "gpt-oss")


@dataclass(frozen=True)
class Cell:
    """One comparison.

    Attributes:
        architecture: row of the table.
        mesh: name of the mesh.
        packed: whether rows are packed.
        precision: precision of the compared run.
        limit: limit of the largest difference.
        found: the differences; None if the run failed.
    """

    architecture: str
    mesh: str
    packed: bool
    precision: str
    limit: float
    found: Difference | None

    @property
    def holds(self) -> bool:
        """Whether all differences are within the limit."""
        return self.found is not None and self.found.largest <= self.limit


def applies(architecture: str, mesh: str) -> bool:
    """Return whether an architecture has the layers that a mesh divides."""
    return architecture in WITH_EXPERTS or "expert_parallel_size" not in MESHES[mesh][1]


def measure(
    architecture: str, model: str, reference: Numbers, mesh: str, *, packed: bool, precision: str, limit: float
) -> Cell:
    """Run one mesh and compare it with the reference."""
    ranks, keys = MESHES[mesh]
    try:
        found = difference(mesh_numbers(model, keys, ranks, packed=packed, precision=precision), reference)
    except Exception as error:
        sys.stderr.write(f"{architecture} on {mesh}: {type(error).__name__}: {error}\n")
        found = None
    cell = Cell(architecture, mesh, packed, precision, limit, found)
    told = "FAILED" if found is None else f"{found.largest:.1e} ({found})"
    sys.stdout.write(f"{architecture:12} {mesh:16} {'packed' if packed else 'padded':7} {told}\n")
    sys.stdout.flush()
    return cell


def compare(architecture: str, options: argparse.Namespace) -> list[Cell]:
    """Return all cells of an architecture; in bfloat16 one rank is measured first and sets the limit of the others."""
    cells: list[Cell] = []
    narrow = options.precision == "bfloat16"
    meshes = [mesh for mesh in options.meshes if applies(architecture, mesh)]
    if narrow:
        meshes = ["1", *(mesh for mesh in meshes if mesh != "1")]
    limits = dict.fromkeys(options.layouts, math.inf if narrow else LIMIT)
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(architecture, Path(folder) / "model", all_experts=narrow)
        reference = one_process(model)
        for mesh in meshes:
            for layout in options.layouts:
                how = {"packed": layout == "packed", "precision": options.precision, "limit": limits[layout]}
                cell = measure(architecture, model, reference, mesh, **how)
                if narrow and mesh == "1" and cell.found:
                    limits[layout] = BESIDE_ONE_RANK * cell.found.largest
                cells.append(cell)
    return cells


def main() -> int:
    """Run the comparisons; return 1 if one is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(ARCHITECTURES), choices=list(ARCHITECTURES))
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--layouts", nargs="+", default=["packed", "padded"], choices=["packed", "padded"])
    parser.add_argument("--precision", default="float32", choices=list(SHOWN))
    parser.add_argument("--write", type=Path, help="Markdown page to write the table to.")
    options = parser.parse_args()
    disable_progress_bar()
    cells: list[Cell] = []
    for architecture in options.only:
        cells += compare(architecture, options)
        if options.write:
            before = options.write.read_text(encoding="utf-8") if options.write.exists() else ""
            options.write.write_text(page(cells, before), encoding="utf-8")
    broken = [cell for cell in cells if not cell.holds]
    sys.stdout.write(f"{len(cells)} comparisons, {len(broken)} above the limit\n")
    return int(bool(broken))


def page(cells: list[Cell], before: str) -> str:
    """Build the page, one table per precision, from its previous text and these cells."""
    tables = {precision: read_table(before, precision) for precision in SHOWN}
    for cell in cells:
        row = tables[cell.precision].setdefault((cell.mesh, "packed" if cell.packed else "padded"), {})
        row[cell.architecture] = "failed" if cell.found is None else format(cell.found.largest, SHOWN[cell.precision])
    shown = {name: drawn(table, ARCHITECTURES, MESHES) for name, table in tables.items() if table}
    return _HEAD + "\n".join(f"\n## {name}\n\n{table}" for name, table in shown.items())


_HEAD = """# Parity of parallel training

```text
python tools/parity_table.py --write docs/reference/parity.md --meshes 1 dp2 tp2+sp dp2xtp2 cp2 cp2xtp2+sp pp2 \\
    pp2-interleaved pp2xtp2+sp ep2 tp2,ep2 cp2,ep2 dp2xtp2,ep2 pp2,ep2
python tools/parity_table.py --write docs/reference/parity.md --precision bfloat16 --layouts packed \\
    --only llama qwen3 gemma3 qwen3-moe deepseek-v3 --meshes tp2+sp dp2xtp2 cp2 pp2 ep2
```

made these tables. Without options the script compares all meshes that it knows; `--write` keeps the cells that it does
not measure. Each cell is the largest relative difference between the ranks of a mesh and one process, over two updates
with plain SGD on the CPU: of the loss, of every entry of every gradient (relative to the largest entry of its tensor),
of the gradient norm and of every log-probability. The one process runs transformers' own model in float64, row by row
without padding. `sp` is sequence parallelism. `–` means not compared: the model has no experts to divide, or the table
was made without this cell.

In float32 every cell is below 1e-5. In bfloat16 the row of one rank shows the effect of rounding alone. A mesh rounds
at other places; its difference from float64 may be 1.5 times that of one rank. In bfloat16 mixtures send every token to
all experts, because rounding would decide between two nearly equal experts.
"""

if __name__ == "__main__":
    sys.exit(main())
