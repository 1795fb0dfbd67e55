"""Write docs/reference/model-support.md: architectures that are trained, divided, converted and served, with the tests.

Run it after a change of the tests or of the comparisons that the page names: `python tools/model_support_table.py`. A
test checks that the committed page is current. Invariant: a cell is only filled where a test of the repository names
the architecture, where a committed page of comparisons has a number for it, or where the library itself says so.
"""

import argparse
import ast
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODELS_TESTS = ROOT / "tests/unit/models"
sys.path[:0] = [str(ROOT / "tools"), str(MODELS_TESTS)]

from parity.models import ARCHITECTURES  # noqa: E402
from parity.page import read_table  # noqa: E402

from nemo_rl.commands.doctor.model_cells import MESHES  # noqa: E402
from nemo_rl.models.huggingface.tensor_plans import OWN, plan_for  # noqa: E402
from nemo_rl.models.megatron.model.families import MODEL_TYPES  # noqa: E402
from nemo_rl.utils.errors import ConfigError  # noqa: E402

DEFAULT_PAGE = ROOT / "docs/reference/model-support.md"
TRIALS = ROOT / "docs/reference/model-support.jsonl"
"""Results of `model_trials.py`: one line of JSON for each model type."""
MEGATRON_TRIALS = ROOT / "docs/reference/model-support-megatron.jsonl"
"""Results of `megatron_trials.py`: one line for each cell."""
VARIANTS = ROOT / "docs/reference/model-support-variants.jsonl"
"""Results of `mesh_sweep.py --variant` and `--named`: one line for each cell."""
PARITY = ROOT / "docs/reference/parity.md"
PARITY_MEGATRON = ROOT / "docs/reference/parity-megatron.md"
YES, NONE = "yes", "–"

type Test = tuple[str, str]
"""File below `tests/unit/models`, and name of a test in it."""

_PACKED = "test_packed_rows_equal_the_models_own_attention_on_padded_rows"
_ROUND_TRIP = "test_a_round_trip_gives_every_tensor_back_bit_for_bit_on_every_rank"

TESTS: Mapping[str, Sequence[Test]] = {
    "packed rows": [
        (
            "dtensor/attention/test_packing_architectures.py",
            _PACKED,
        ),
        ("dtensor/attention/test_recurrent.py", "test_packed_rows_equal_rows_alone"),
    ],
    "context parallel": [
        ("dtensor/test_context_parallel.py", "test_ranks_that_split_rows_equal_transformers_in_one_process")
    ],
    "pipeline": [("dtensor/pipeline/test_pipeline_parity.py", "test_two_stages_with_uneven_layers_equal_one_process")],
    "LoRA": [
        ("dtensor/lora/test_adapter_in_peft.py", "test_peft_computes_the_trained_policy_from_the_adapter"),
        ("dtensor/lora/test_adapter_export.py", "test_the_command_writes_the_trained_policy"),
        ("dtensor/lora/test_lora.py", "test_a_checkpoint_restores_every_bit"),
    ],
    "hub files": [
        ("dtensor/checkpoints/test_checkpoint_names.py", "test_a_checkpoint_is_what_save_pretrained_writes"),
        ("generation/test_vllm_export.py", "test_vllm_reproduces_the_log_probs_of_exported_checkpoints"),
    ],
    "vLLM on CPU": [
        ("generation/test_vllm_engine.py", "test_greedy_after_each_update_equals_hugging_face"),
        ("generation/test_vllm_export.py", "test_vllm_reproduces_the_log_probs_of_exported_checkpoints"),
    ],
    "Megatron conversion": [
        (
            "megatron/conversion/test_conversion.py",
            _ROUND_TRIP,
        )
    ],
    "Megatron LoRA": [("megatron/lora/test_megatron_lora.py", "test_one_rank_trains_like_peft")],
}
"""Column -> tests that prove it, for each architecture that the test names."""

_AXES = {"tensor parallel": "tp", "context parallel": "cp", "pipeline": "pp", "experts": "ep"}
"""Column -> name of the axis in the meshes of the pages of comparisons."""


@cache
def _module(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def texts_of(path: Path, name: str) -> set[str]:
    """Return the texts in a function or variable of a file, and in the variables of the tests that it uses.

    Args:
        path: the file.
        name: a function or a variable at the top of it.

    Raises:
        ValueError: the file has no such name.
    """
    found, seen = set(), {(path, name)}
    pending = [(path, name)]
    while pending:
        file, wanted = pending.pop()
        node = _definition(file, wanted)
        if node is None:
            if (file, wanted) == (path, name):
                raise ValueError(f"{path} has no {name}")
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                found.add(part.value)
            if isinstance(part, ast.Name):
                more = {(file, part.id), (_imported_from(file, part.id), part.id)} - seen
                seen |= more
                pending += [(where, each) for where, each in more if _is_a_value(where, each)]
    return found


def _definition(file: Path, name: str) -> ast.stmt | None:
    for node in _module(file).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node
    return None


def _is_a_value(file: Path, name: str) -> bool:
    """Return whether a name is a variable of a file; what a called function names says nothing about its caller."""
    return isinstance(_definition(file, name), ast.Assign | ast.AnnAssign)


def _imported_from(file: Path, name: str) -> Path:
    """Return the module of the tests or the library from which a name is imported; the file itself if it is not."""
    for node in _module(file).body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            path = f"{(node.module or '').replace('.', '/')}.py"
            for folder in (file.parent, MODELS_TESTS, ROOT):
                if (folder / path).exists():
                    return folder / path
    return file


def proven(column: str) -> set[str]:
    """Return the architectures that the tests of a column name."""
    return set().union(*(texts_of(MODELS_TESTS / file, name) for file, name in TESTS[column]))


def compared(page: Path, meshes_with: str, names: Mapping[str, str]) -> dict[str, float]:
    """Return the largest difference of each architecture on the meshes of a page that have an axis.

    Args:
        page: page of comparisons.
        meshes_with: name of the axis; "" takes the mesh of one rank.
        names: column of the page -> `model_type`.
    """
    largest: dict[str, float] = {}
    for (mesh, _), row in read_table(page.read_text(encoding="utf-8"), "float32").items():
        if mesh != "1" if not meshes_with else not _has(mesh, meshes_with):
            continue
        for name, value in row.items():
            if value[0].isdigit():
                largest[names[name]] = max(largest.get(names[name], 0.0), float(value))
    return largest


def _has(mesh: str, axis: str) -> bool:
    parts = mesh.replace("vpp", "interleaved").replace(",", "x").replace("+", "x").replace("-", "x").split("x")
    return any(part.startswith(axis) for part in parts)


def architectures() -> ModuleType:
    """Return the module of the tests that makes tiny models of many architectures."""
    import architectures

    return architectures


def plan(model_type: str) -> str:
    """Describe where the plan of an architecture for tensor parallelism comes from; "none" if there is none."""
    try:
        plan_for(architectures().random_model(model_type))
    except ConfigError:
        return "none"
    return "ours" if model_type in OWN else "transformers"


def rows() -> Iterator[tuple[str, ...]]:
    """Yield the cells of each architecture that packs or that Megatron Core trains."""
    packs: Collection[str] = architectures().PACKS
    theirs = {name: kind for name, (kind, _) in ARCHITECTURES.items()}
    mine = {axis: compared(PARITY, mesh, theirs) for axis, mesh in {"one rank": "", **_AXES}.items()}
    own_names = {name: name for name in MODEL_TYPES}
    megatron = {axis: compared(PARITY_MEGATRON, mesh, own_names) for axis, mesh in {"one rank": "", **_AXES}.items()}
    found = {column: proven(column) for column in TESTS}
    for kind in sorted({*packs, *MODEL_TYPES}):
        numbers = [mine[axis].get(kind) for axis in _AXES]
        cells = [f"{number:.0e}" if number is not None else NONE for number in numbers]
        for place, axis in enumerate(_AXES):
            if cells[place] == NONE and kind in found.get(axis, ()):
                cells[place] = YES
        meshes = ", ".join(mesh for axis, mesh in _AXES.items() if kind in megatron[axis])
        of_tests = [YES if kind in found[name] else NONE for name in ("LoRA", "hub files", "vLLM on CPU")]
        of_megatron = [f"{megatron['one rank'][kind]:.0e}, {meshes}" if kind in megatron["one rank"] else NONE]
        of_megatron += [YES if kind in found[name] else NONE for name in ("Megatron conversion", "Megatron LoRA")]
        packed = YES if kind in found["packed rows"] else NONE
        yield (f"`{kind}`", packed, plan(kind), *cells, *of_tests, *of_megatron)


_PLAN_PAGE = "../development/fsdp2-parallel-plan.md"
_LEGEND = {
    "a number": "the largest relative difference of losses, gradients, their norm and log-probabilities from "
    "transformers' own model in float64 in one process, on all meshes with this axis on the page of comparisons "
    "([DTensor](parity.md), [Megatron Core](parity-megatron.md))",
    "`yes`": "a test compares this architecture",
    "`ours`, `transformers`": "the plan that divides layers for tensor parallelism is in the library, or comes with "
    "the model",
    "`none`": f"there is no plan: tensor parallelism is refused unless you [give one]({_PLAN_PAGE}#adding-a-model)",
    "`–`": "no test has this architecture. The rules are general, so it may work: a run proves its mesh before it "
    f"starts ([the proof]({_PLAN_PAGE}#the-proof-before-a-start))",
}

_HEAD = """# Supported models

Made by `python tools/model_support_table.py` from the tests and the pages of comparisons; a test fails if it is not
current. Rows are values of `model_type` in a model's `config.json`; models of one type differ only in their sizes, so
`qwen2` stands for Qwen2 and Qwen2.5 of every size, and `llama` for all of Llama 2 and 3.

**DTensor** (`policy.dtensor_cfg`, the default) trains every causal language model of transformers that has a list of
decoder layers; the table shows what is proven beyond that. **Megatron Core** (`policy.megatron_cfg`) trains the types
that have a number in its column, and refuses all others by name before the start.

{legend}

All of these comparisons run on CPUs, with tiny random models that have the special features of their architecture
(windows, sinks, latent attention, experts). [What a CPU can and cannot show](../development/gpu-readiness.md) lists the
checks that need a GPU.

## Training, files and engines

"""

_TAIL = """
`yes` in the column *hub files* means that a checkpoint has the names and shapes of `save_pretrained`, and loads again
bit for bit. `yes` in the column *vLLM on CPU* means that the engine gives the log-probabilities of training, after
weight updates or from an exported folder. Other architectures that vLLM serves are checked when a run starts, by the
engine's receipt of the weights and a comparison of probabilities ([weight sync](../development/weight-sync.md#proof)).
`policy.generation.backend=hf` samples with transformers instead.

The column *Megatron Core* has the difference of one rank, and the axes whose meshes are compared.
[Its page](parity-megatron.md#refused) lists the meshes that are refused for a family.

## Refused

Packed rows are refused for these types, because their results would differ from padded rows, or because the library
cannot replace their attention. They train with `policy.sequence_packing.enabled=false`:

"""

_PROOF = """
If the library cannot replace the attention of a type, context parallelism is refused too.

## The tests

| column | tests below `tests/unit/models` |
|---|---|
"""

_TRIALS = """
## All model types

These are the results of `nemo_rl doctor --model` for every causal language model type of the installed transformers, on
a small random model of the type: the largest relative difference of loss, log-probabilities, gradients and their norm
from transformers in one process. `padded` means that packed rows are refused on this mesh, and `–` that the mesh is
refused; the doctor prints the reasons. `python tools/model_trials.py` makes the results, and
`python tools/mesh_sweep.py` compares meshes with an independent reference.

"""

_TRIAL_COLUMNS = ("model type", *MESHES, "shared prompts", "LoRA", "tried")
_OF_MEGATRON = """
## All types and meshes of Megatron Core

These are the same trials for the types that Megatron Core trains, on a small model of each: the largest relative
difference of loss, log-probabilities and the norm of the gradient from transformers in one process, in float32, and of
each weight after a step of SGD by the names of the files, as a fraction of its tensor's largest step; before it, the
exported weights are those of the files bit for bit. Tensor parallelism with stages has sequence parallelism, without
which Megatron Core trains no experts. `python tools/megatron_trials.py` makes the results. All other types are refused
by name.

"""
_OF_VARIANTS = """
## Drawn sizes and options

`python tools/mesh_sweep.py --variant SEED` draws the numbers of heads, layers, experts and tokens, sizes of heads,
biases, norms of queries and keys, tied embeddings, caps, windows and rotary scalings of each type, and compares one
update with transformers' own model in float64, padded and packed. A cell counts the results of all seeds. `wrong` or
`crashed` would be an error that no check has found before the start.

"""
_VARIANT_COLUMNS = {"1": "one rank", "tp2": "TP 2", "cp2": "CP 2", "pp2": "PP 2"}
_OF_OPTIONS = """
## Options of families

Published models of one type differ in options that change which code runs: windows, biases, shared experts, layers of
one kind, scaled frequencies. `python tools/mesh_sweep.py --named` makes a small model of each option
(`tools/parity/families.py`) and compares one update with transformers' own model in float64, on meshes that the check
before a start accepts. A number is the largest relative difference, `padded` means that packed rows are refused on this
mesh, `–` that the mesh is refused, and an empty cell that it has not been tried.

"""
_OPTION_COLUMNS = {
    "1": "one rank",
    "tp2": "TP 2",
    "tp2sp": "TP 2 with SP",
    "cp2": "CP 2",
    "pp2": "PP 2",
    "ep2": "EP 2",
    "pp2tp2": "PP 2 and TP 2",
}

_COLUMNS = (
    *("model type", "packed rows", "plan", "tensor parallel", "context parallel", "pipeline", "expert parallel"),
    *("LoRA", "hub files", "vLLM on CPU", "Megatron Core", "Megatron conversion", "Megatron LoRA"),
)

_RUN = """
To run the tests of a column:

```text
pytest tests/unit/models/dtensor/attention/test_packing_architectures.py
pytest tests/unit/models/generation/test_vllm_engine.py -k greedy
```

To add an architecture: [the parallel plan](../development/fsdp2-parallel-plan.md#adding-a-model), and for Megatron Core
[adding a family](../development/megatron-backend.md#adding-a-family).
"""


def stored_trials(file: Path = TRIALS) -> dict[str, dict[str, Any]]:
    """Return the results of `model_trials.py` by model type."""
    if not file.exists():
        return {}
    results = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {row["model_type"]: row for row in results}


def trial_rows() -> Iterator[tuple[str, ...]]:
    """Yield the cells of each model type that has been tried."""
    for kind, row in stored_trials().items():
        cells = {f"{part}, {what}": (result, difference) for part, what, result, difference, _ in row["cells"]}
        if not cells:
            continue
        of_meshes = [_both(cells, "training", mesh) for mesh in MESHES]
        shared = _number(cells.get("training, one rank, shared prompts"))
        adapted = _number(cells.get("LoRA, one rank, packed"))
        yield (f"`{kind}`", *of_meshes, shared, adapted, row["date"])


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def megatron_rows() -> Iterator[tuple[str, ...]]:
    """Yield the cells of each type that Megatron Core trains."""
    trials = [trial for trial in _lines(MEGATRON_TRIALS) if trial["seed"] is None]
    for kind in sorted({trial["model_type"] for trial in trials}):
        mine = [trial for trial in trials if trial["model_type"] == kind]
        cells = {f"{MEGATRON}, {trial['what']}": (trial["result"], trial["difference"]) for trial in mine}
        yield (f"`{kind}`", *(_both(cells, MEGATRON, mesh) for mesh in MESHES), max(trial["date"] for trial in mine))


MEGATRON = "Megatron Core"


def variant_rows() -> Iterator[tuple[str, ...]]:
    """Yield the numbers of results of each type over all seeds."""
    cells = [cell for cell in _lines(VARIANTS) if cell["mesh"] in _VARIANT_COLUMNS and not cell.get("named")]
    for kind in sorted({cell["model_type"] for cell in cells}):
        mine = [cell for cell in cells if cell["model_type"] == kind]
        results = [[cell["result"] for cell in mine if cell["mesh"] == mesh] for mesh in _VARIANT_COLUMNS]
        shown = [", ".join(f"{each.count(one)} {one}" for one in sorted({*each})) or NONE for each in results]
        yield (f"`{kind}`", str(len({cell["seed"] for cell in mine})), *shown)


def option_rows() -> Iterator[tuple[str, ...]]:
    """Yield the results of each named variant of a type."""
    cells = [cell for cell in _lines(VARIANTS) if cell.get("named")]
    for kind, named in sorted({(cell["model_type"], cell["named"]) for cell in cells}):
        mine = [cell for cell in cells if (cell["model_type"], cell["named"]) == (kind, named)]
        on_mesh = [{cell["rows"]: cell for cell in mine if cell["mesh"] == mesh} for mesh in _OPTION_COLUMNS]
        yield (f"`{kind}`", named, *map(_of_option, on_mesh))


def _of_option(by_rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the largest difference of a mesh's padded and packed rows, or how they ended."""
    results = {rows: cell["result"] for rows, cell in by_rows.items()}
    if not {*results.values()} <= {"right", "refused"}:
        return "failed"
    right = [float(by_rows[rows]["told"].split()[-1]) for rows, result in results.items() if result == "right"]
    if not right:
        return NONE if results else ""
    return f"{max(right):.0e}{' padded' if results.get('packed') == 'refused' else ''}"


def _both(cells: Mapping[str, tuple[str, float | None]], part: str, mesh: str) -> str:
    """Return the larger difference of padded and packed rows, or that of padded rows alone."""
    padded, packed = (cells.get(f"{part}, {mesh}, {rows}") for rows in ("padded", "packed"))
    if padded is None or packed is None or padded[0] != "right" or padded[1] is None:
        return _number(padded)
    if packed[0] == "right" and packed[1] is not None:
        return f"{max(padded[1], packed[1]):.0e}"
    return f"{padded[1]:.0e} padded" if packed[0] == "refused" else "failed"


def _number(cell: tuple[str, float | None] | None) -> str:
    if cell is None or cell[0] in ("refused", "skipped"):
        return NONE
    return f"{cell[1]:.0e}" if cell[0] == "right" and cell[1] is not None else "failed"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{'|'.join(['---'] * len(columns))}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def page() -> str:
    """Build the page."""
    table = _table(_COLUMNS, rows())
    tiny = architectures()
    refused = ", ".join(f"`{kind}`" for kind in sorted({*tiny.REFUSED_AT_LOAD, *tiny.REFUSED_BY_PROBE}))
    tests = "".join(
        f"| {column} | {', '.join(f'`{file}::{name}`' for file, name in named)} |\n" for column, named in TESTS.items()
    )
    legend = "".join(f"| {cell} | {meaning} |\n" for cell, meaning in _LEGEND.items())
    head = _HEAD.replace("{legend}\n", f"| cell | means |\n|---|---|\n{legend}")
    tried = _TRIALS + _table(_TRIAL_COLUMNS, trial_rows()) if TRIALS.exists() else ""
    if MEGATRON_TRIALS.exists():
        tried += _OF_MEGATRON + _table(("model type", *MESHES, "tried"), megatron_rows())
    if VARIANTS.exists():
        tried += _OF_VARIANTS + _table(("model type", "seeds", *_VARIANT_COLUMNS.values()), variant_rows())
        tried += _OF_OPTIONS + _table(("model type", "options", *_OPTION_COLUMNS.values()), option_rows())
    return f"{head}{table}{_TAIL}{refused}.\n{_PROOF}{tests}{_RUN}{tried}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DEFAULT_PAGE, help="page to write")
    parser.parse_args(arguments).output.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
