"""Train all types that Megatron Core knows on its meshes, compare with transformers, and store the results.

    python tools/megatron_trials.py [--types llama,gpt_oss] [--meshes "TP 2,PP 2"] [--variant SEED] [--again]

A small model of each type (`parity.every_type`) is trained for one step on the ranks of each mesh, as
`nemo_rl doctor --model` does with a small copy of a model. Ranks are started once for each mesh. One line of JSON per
cell is stored, so the tool can be stopped and started again; `tools/model_support_table.py` makes the page from them.
The exit status is 1 if a cell failed.
"""

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import transformers
from parity.every_type import model_types, tiny_form
from parity.quiet import be_quiet

from nemo_rl.commands.doctor.megatron_cells import MEGATRON_MESHES, SmallModel, asked_as, cells_of_mesh
from nemo_rl.commands.doctor.model import Question
from nemo_rl.commands.doctor.model_cells import PACKED, PADDED, Cell, TrialResult
from nemo_rl.models.megatron.model.families import MODEL_TYPES
from nemo_rl.utils.errors import ConfigError

STORE = Path(__file__).resolve().parents[1] / "docs/reference/model-support-megatron.jsonl"
_COMPOSITE = ("qwen3_5", "qwen3_5_moe")
"""Types whose text model Megatron Core trains."""
_LONGEST_REASON = 300


@dataclass(frozen=True)
class MegatronTrial:
    """Result of one type on one mesh.

    Attributes:
        model_type: name of the type.
        what: mesh and rows.
        seed: seed of a variant, or None for the usual sizes.
        date: day of the trial.
        versions: releases of transformers and Megatron Core.
        result: see `TrialResult`, or `not built`.
        difference: largest relative difference from transformers.
        told: reason of a refusal or failure.
    """

    model_type: str
    what: str
    seed: int | None
    date: str
    versions: str
    result: str
    difference: float | None
    told: str

    @property
    def key(self) -> tuple[str, str, int | None]:
        """Type, setting and seed."""
        return self.model_type, self.what, self.seed


def known_types() -> list[str]:
    """Return the types that Megatron Core trains."""
    return [name for name in model_types() if name in (*MODEL_TYPES, *_COMPOSITE)]


def versions() -> str:
    """Return the releases that a result depends on."""
    return f"transformers {transformers.__version__}, megatron-core {version('megatron-core')}"


def stored(file: Path) -> dict[tuple[str, str, int | None], MegatronTrial]:
    """Return the stored results by their keys."""
    if not file.exists():
        return {}
    trials = [MegatronTrial(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    return {trial.key: trial for trial in trials}


def write(trials: Sequence[MegatronTrial], file: Path) -> None:
    """Write results in the order of types, variants and meshes."""
    order = [asked_as(mesh, rows) for mesh in MEGATRON_MESHES for rows in (PADDED, PACKED)]
    given = sorted(trials, key=lambda each: (each.model_type, each.seed or 0, order.index(each.what)))
    file.write_text("".join(json.dumps(asdict(each)) + "\n" for each in given), encoding="utf-8")


def trial_of(model_type: str, seed: int | None, cell: Cell) -> MegatronTrial:
    """Return a cell as a line of the store."""
    return MegatronTrial(
        model_type=model_type,
        what=cell.what,
        seed=seed,
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        versions=versions(),
        result=str(cell.result),
        difference=None if cell.difference is None else float(f"{cell.difference:.1e}"),
        told="" if cell.result is TrialResult.RIGHT else cell.told.replace("\n", " ")[:_LONGEST_REASON],
    )


def small_model_of(model_type: str, seed: int | None, folder: Path) -> SmallModel:
    """Make a model in a folder.

    Raises:
        ValueError, ConfigError: no small model of the type can be built.
    """
    model, config = tiny_form(model_type, seed)
    model.save_pretrained(folder / "model")
    config.save_pretrained(folder / "config")
    question = Question.of(str(folder / "config"), [])
    return SmallModel(model_type, question.policy, model, str(folder / "model"))


def trials_on(mesh: str, types: Sequence[str], seed: int | None) -> Iterator[MegatronTrial]:
    """Yield the results of some types on one mesh."""
    with ExitStack() as stack:
        models = []
        for model_type in types:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="megatron-trials-"))
            try:
                models.append(small_model_of(model_type, seed, Path(folder)))
            except (ValueError, ConfigError) as error:
                for rows in (PADDED, PACKED):
                    cell = Cell("", asked_as(mesh, rows), TrialResult.SKIPPED, f"not built: {error}")
                    yield trial_of(model_type, seed, cell)
        for model, cell in cells_of_mesh(mesh, models):
            told = cell.told.replace(model.base.model_name, model.name).replace(model.folder, model.name)
            shown = Cell(cell.part, cell.what, cell.result, told, cell.difference, cell.seconds)
            yield trial_of(model.name, seed, shown)


def main(arguments: list[str] | None = None) -> int:
    """Try types, store each result as soon as it is there, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="comma-separated; all that Megatron Core trains by default")
    parser.add_argument("--meshes", default=",".join(MEGATRON_MESHES), help="comma-separated; all by default")
    parser.add_argument("--variant", type=int, help="seed of other sizes and options")
    parser.add_argument("--again", action="store_true", help="try cells again whose results are stored")
    parser.add_argument("--store", type=Path, default=STORE, help="file of the results")
    given = parser.parse_args(arguments)
    types = given.types.split(",") if given.types else known_types()
    be_quiet()
    failed = 0
    for mesh in given.meshes.split(","):
        before = stored(given.store)
        done = {key[:2] for key, trial in before.items() if key[2] == given.variant and trial.versions == versions()}
        pending = [name for name in types if given.again or (name, asked_as(mesh, PACKED)) not in done]
        for trial in trials_on(mesh, pending, given.variant):
            before[trial.key] = trial
            write([*before.values()], given.store)
            failed += trial.result == TrialResult.FAILED
            shown = trial.told if trial.difference is None else f"{trial.difference:.1e} {trial.told}"
            sys.stdout.write(f"{trial.model_type:20} {trial.what:22} {trial.result:8} {shown}\n")
            sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
