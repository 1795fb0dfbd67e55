"""Write docs/reference/sizing.md: for every recipe the sizes that `nemo_rl size` proposes, next to the recipe's own.

Run it after a change of recipes, of a memory model or of `nemo_rl/commands/size/`:
`python tools/generate_sizing_table.py`. A test checks that the committed page is current. Invariant: every number comes
from the functions of the command.
"""

import argparse
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nemo_rl.commands.dry_run import mesh_text
from nemo_rl.commands.size.candidates import candidate_of
from nemo_rl.commands.size.jobs import GpuKind, Job, chosen_gpu
from nemo_rl.commands.size.proposal import Proposal, described, propose
from nemo_rl.commands.size.run import own_train_seconds
from nemo_rl.config import MasterConfig, load_config
from nemo_rl.config.base.paths import REPOSITORY_ROOT
from nemo_rl.config.loading.algorithms import ALGORITHMS
from nemo_rl.models.capacity.memory import microbatch_tokens

RECIPES = REPOSITORY_ROOT / "examples" / "configs" / "recipes" / "llm"
DEFAULT_PAGE = REPOSITORY_ROOT / "docs" / "reference" / "sizing.md"
GPU_GB = 80.0
_HEAD = f"""# Proposed sizes of the recipes

For each recipe, the line *own* has the sizes of its file, and the line *proposed* what
`nemo_rl size RECIPE --gpu-memory {GPU_GB:g}GiB` proposes for the same machines. The table is made by
`python tools/generate_sizing_table.py`. Nothing here was run on GPUs: the seconds are estimates, of which only ratios
mean something ([the model of costs](../machines/sizing.md#the-model-of-costs)). Every proposal passes the forecast of
memory of the [dry run](../start/recipes.md#the-dry-run).

| column | meaning |
|---|---|
| tokens | tokens of a microbatch |
| engines | number x GPUs of each, at `gpu_memory_utilization` |
| peak GiB | predicted largest memory of a GPU, in training / in all phases |
| seconds | estimated seconds of training in a step |

| recipe | | mesh | recomputation | tokens | engines | peak GiB | seconds |
|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Sized:
    """A recipe with its own sizes and the proposed ones.

    Attributes:
        name: name of the file, without suffix.
        own: the recipe, with models that can be described here.
        gpu: the GPUs.
        proposal: the proposal.
    """

    name: str
    own: MasterConfig
    gpu: GpuKind
    proposal: Proposal


@cache
def sized(path: Path) -> Sized:
    """Size a recipe, whose name starts with its algorithm."""
    gpu = chosen_gpu(None, GPU_GB)
    config = load_config(path, schema=ALGORITHMS[path.stem.split("-")[0]])
    assert isinstance(config, MasterConfig), "recipes train"
    own = described(config, gpu)
    found = propose(own, gpu)
    assert found is not None, f"nothing fits for {path.stem}"
    return Sized(path.stem, own, gpu, found)


def page() -> str:
    """Return the text of the page."""
    return _HEAD + "".join(map(_rows, map(sized, sorted(RECIPES.glob("*.yaml")))))


def _rows(each: Sized) -> str:
    own = _cells(each.own, each.gpu, own_train_seconds(each.own, each.gpu))
    found = _cells(each.proposal.config, each.gpu, each.proposal.train_seconds)
    return _row(each.name, "own", *own) + _row("", "proposed", *found)


def _cells(config: MasterConfig, gpu: GpuKind, seconds: float) -> list[str]:
    from nemo_rl.algorithms.setup.memory_forecast import forecast_memory

    job = Job(config, "policy", gpu)
    forecast = forecast_memory(config, gpu.memory_gib * 2**30)
    training = max(sum(plan.moments.get("training", {}).values()) for plan in forecast.groups.values())
    peak = max(plan.peak for plan in forecast.groups.values())
    engine = config.policy.generation.engine if config.policy.generation else None
    size = engine.tensor_parallel_size * engine.pipeline_parallel_size if engine else 1
    engines = f"{job.ranks // size} x {size} at {engine.gpu_memory_utilization:g}" if engine else ""
    candidate = candidate_of(job)
    return [
        mesh_text(config.policy, job.ranks) or "1",
        candidate.recompute + (", offload" if candidate.offload else ""),
        str(microbatch_tokens(config.policy, trains=True, rows_per_sample=job.rows_each)),
        engines,
        f"{training / 2**30:.1f} / {peak / 2**30:.1f}",
        f"{seconds:.3g}",
    ]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, nargs="?", default=DEFAULT_PAGE, help="file to write")
    given = parser.parse_args()
    given.page.write_text(page(), encoding="utf-8")
    print(f"wrote {given.page}")


if __name__ == "__main__":
    main()
