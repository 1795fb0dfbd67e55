"""Compare Megatron Core on every mesh with transformers and torch's AdamW, for each family; write a table.

        python tools/megatron_parity_table.py                                  # everything, on the terminal: minutes
    python tools/megatron_parity_table.py --only llama gpt_oss --meshes tp2+sp pp2
        python tools/megatron_parity_table.py --write docs/reference/parity-megatron.md  # keeps other cells of the page

Each cell is the largest relative difference of losses, gradients, their norms, log-probabilities and of the weights
after four updates, on the CPU in float32, from the same model of transformers in float64 in one process. This is the
comparison of `tests/unit/models/megatron/mesh_parity.py`, which needs the packages of the tests and the extra `mcore`.
"""

import argparse
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from parity.page import Table, drawn, read_table
from transformers.utils.logging import disable_progress_bar

TESTS = Path(__file__).resolve().parents[1] / "tests/unit/models"
sys.path[:0] = [str(TESTS / "megatron"), str(TESTS)]

import mesh_parity  # noqa: E402
from rank_backend import policy_of  # noqa: E402
from rank_host import Host, limit_waits  # noqa: E402
from small_models import hf_config  # noqa: E402

from nemo_rl.distributed.parallel_layout import ParallelLayout  # noqa: E402
from nemo_rl.models.megatron.mesh_check import check_mesh  # noqa: E402

LIMIT = 1e-5
WITH_EXPERTS = (
    *("qwen3_moe", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2", "nemotron_h", "gpt_oss"),
    *("qwen3_next", "qwen3_5_moe_text"),
)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "qwen3_5_text", *WITH_EXPERTS)
ROUNDING = "transformers"
"""Row of transformers' own model in float32, which shows the effect of rounding alone."""
SP = {"tp": 2, "sp": True}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    ROUNDING: (0, {}),
    "1": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2+sp": (2, SP),
    "pp2": (2, {"pp": 2}),
    "pp2xvpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2, distributed optimizer": (2, {"optimizer": {"use_distributed_optimizer": True}}),
    "ep2": (2, {"ep": 2}),
    "tp2+sp,ep2": (4, {**SP, "ep": 2}),
    "pp2,ep2": (4, {"pp": 2, "ep": 2}),
}
"""Mesh -> number of ranks, and sizes."""
LAYOUTS = ("padded", "packed")
REFUSED = "refused"
TITLE = "float32"

type Cell = tuple[str, str]
"""Mesh and layout of the rows."""


def refusals(family: str, mesh: str) -> list[str]:
    """Return why a run with this mesh is refused before it starts."""
    ranks, sizes = MESHES[mesh]
    policy = policy_of(**sizes)
    return list(check_mesh(policy, ParallelLayout.of(policy, ranks or 1), hf_config(family, num_hidden_layers=4)))


def applies(family: str, mesh: str) -> bool:
    """Return whether a family has the layers that a mesh divides."""
    return family in WITH_EXPERTS or "ep" not in MESHES[mesh][1]


def on_rank(rank: int, world: int, family: str, cells: list[Cell], expected: Any) -> dict[Cell, dict[str, float]]:
    """Return this rank's differences in some cells of a family."""
    limit_waits(120.0)
    return {
        (mesh, rows): mesh_parity.run_case(family, rows == "packed", MESHES[mesh][1], expected) for mesh, rows in cells
    }


def measure(host: Host, family: str, cells: list[Cell]) -> dict[Cell, dict[str, float]]:
    """Return the largest differences of any rank in a family's cells; cells with equal rank counts share ranks."""
    expected = mesh_parity.reference(family)
    found: dict[Cell, dict[str, float]] = {}
    for world in sorted({MESHES[mesh][0] for mesh, _ in cells}):
        mine = [cell for cell in cells if MESHES[cell[0]][0] == world]
        if world == 0:
            found |= dict.fromkeys(mine, mesh_parity.rounding(family, expected))
            continue
        ranks = host.run(on_rank, world, family, mine, expected)
        found |= {cell: mesh_parity.worst([rank[cell] for rank in ranks]) for cell in mine}
    return found


def compare(host: Host, family: str, meshes: Iterable[str], layouts: Iterable[str]) -> dict[Cell, str]:
    """Return the texts of a family's cells."""
    shown: dict[Cell, str] = {}
    cells: list[Cell] = []
    for mesh in (mesh for mesh in meshes if applies(family, mesh)):
        for rows in ("unpadded",) if mesh == ROUNDING else layouts:
            if refusals(family, mesh):
                shown[mesh, rows] = REFUSED
            else:
                cells.append((mesh, rows))
    for (mesh, rows), found in measure(host, family, cells).items():
        largest = max(found.values())
        told = ", ".join(f"{what} {value:.1e}" for what, value in found.items())
        sys.stdout.write(f"{family:12} {mesh:26} {rows:8} {largest:.1e} ({told})\n")
        shown[mesh, rows] = f"{largest:.1e}"
    sys.stdout.flush()
    return shown


def main() -> int:
    """Run the comparisons; return 1 if one is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--write", type=Path, help="Markdown page to write the table to.")
    options = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)  # the models are tiny
    warnings.simplefilter("ignore")  # warnings of the libraries would repeat for each rank
    host, shown = Host(), dict[str, dict[Cell, str]]()
    try:
        for family in options.only:
            shown[family] = compare(host, family, options.meshes, options.layouts)
            if options.write:
                before = options.write.read_text(encoding="utf-8") if options.write.exists() else ""
                options.write.write_text(page(shown, before), encoding="utf-8")
    finally:
        host.stop()
    values = [value for cells in shown.values() for value in cells.values() if value != REFUSED]
    above = sum(not float(value) < LIMIT for value in values)
    sys.stdout.write(f"{len(values)} comparisons, {above} above the limit\n")
    return int(above > 0)


def page(shown: dict[str, dict[Cell, str]], before: str) -> str:
    """Build the page from its previous text and these cells."""
    table: Table = read_table(before, TITLE)
    for family, cells in shown.items():
        for cell, value in cells.items():
            table.setdefault(cell, {})[family] = value
    return f"{_HEAD}\n## {TITLE}\n\n{drawn(table, FAMILIES, MESHES)}\n## Refused\n\n{_reasons(table)}"


def _reasons(table: Table) -> str:
    """List each refused mesh with the messages of the check before a start."""
    refused = {(mesh, name) for (mesh, _), row in table.items() for name, value in row.items() if value == REFUSED}
    return "".join(f"- `{mesh}`: {' '.join(refusals(name, mesh))}\n" for mesh, name in sorted(refused))


_HEAD = """# Parity of the Megatron Core backend

```text
python tools/megatron_parity_table.py --write docs/reference/parity-megatron.md
```

made this table; `--only`, `--meshes` and `--layouts` measure a part of it and keep the other cells. Each cell is the
largest relative difference between the [Megatron Core backend](../development/megatron-backend.md) in float32 and
transformers' own model in float64, in one process and row by row without padding, over four updates with AdamW and
clipping on the CPU: of losses, gradient norms and log-probabilities, of every gradient of the first update (not with
the distributed optimizer, where a rank sums a part of it), and of every weight after the last one; both relative to
the largest entry of their tensor. Models have four layers and random weights, with the special features of a
family (windows, sinks, YaRN, dense layers among sparse ones, shared experts, ...) switched on.

The limit is 1e-5. The first row compares transformers' model in float32 with itself in float64, which shows the effect
of rounding alone. `sp` is sequence parallelism, `vpp` interleaved stages; `–`: the model has no experts to divide.
Refused meshes are listed below with the message that a run gives before it starts.
"""

if __name__ == "__main__":
    sys.exit(main())
