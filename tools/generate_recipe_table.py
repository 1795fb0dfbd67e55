"""Write docs/reference/recipes.md: every recipe with its layout, numbers of rows and tokens, and predicted memory.

Run it after a change of `examples/configs/recipes/` or of a memory model: `python tools/generate_recipe_table.py`. A
test checks that the committed page is current. Invariant: every number comes from the functions that `--dry-run` uses.
"""

import argparse
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nemo_rl.algorithms.setup.memory_forecast import MemoryForecast, rows_per_sample
from nemo_rl.commands.dry_run import describe, mesh_text
from nemo_rl.config import MasterConfig, RolloutMasterConfig, load_config, model_ranks
from nemo_rl.config.base.paths import REPOSITORY_ROOT
from nemo_rl.config.loading.algorithms import ALGORITHMS

RECIPES = REPOSITORY_ROOT / "examples" / "configs" / "recipes" / "llm"
DEFAULT_PAGE = REPOSITORY_ROOT / "docs" / "reference" / "recipes.md"
GPU_GB = 80
_HEAD = f"""# Table of recipes

Files of `examples/configs/recipes/llm/`, for GPUs of {GPU_GB} GB, made from their dry runs by
`python tools/generate_recipe_table.py`. [The guide](../start/recipes.md) says which to choose and how to fit your own
model. The numbers are predictions: no recipe has been run on GPUs.

A name is `<algorithm>-<model>-<nodes>n<GPUs of each>g-<how the model is spread>[-variant]`. In the mesh, `fsdp` is the
number of data-parallel ranks that share the weights (axis `dp_shard`), and `dp` that of Megatron Core. Tokens are those
of a step in which all answers have the maximum length.

| recipe | GPUs | mesh | engines | samples a step | updates | tokens a step |
|---|---|---|---|---|---|---|
"""
_MEMORY = """
## Memory of each GPU

Peak GiB of each phase, and host memory per GPU at the same time. Colocated engines take `gpu_memory_utilization` of the
GPU even if they need less, for a larger cache; *answers* is the number of answers of full length that fit into the
cache of one engine.

| recipe | training | log-probs | teacher | generation | weight sync | answers | host | checkpoint GB |
|---|---|---|---|---|---|---|---|---|
"""
_PHASES = ("training", "log-probs", "teacher's scores", "generation", "weight sync")


@dataclass(frozen=True)
class Recipe:
    """A file and its dry run.

    Attributes:
        name: name of the file, without suffix.
        config: the file's configuration, for GPUs of `GPU_GB`.
        forecast: forecast of its memory.
        checkpoint: bytes of one checkpoint.
        text: output of `--dry-run`.
    """

    name: str
    config: MasterConfig
    forecast: MemoryForecast
    checkpoint: int
    text: str


@cache
def recipe(path: Path, *overrides: str) -> Recipe:
    """Run a dry run of a file whose name starts with its algorithm."""
    schema = ALGORITHMS[path.stem.split("-")[0]]
    config = load_config(path, [f"cluster.gpu_memory_gb={GPU_GB}", *overrides], schema=schema)
    description = describe(config)
    return Recipe(path.stem, config, description.forecast, description.checkpoint or 0, description.text)


def recipes() -> list[Recipe]:
    """Return all recipes, sorted by name."""
    return [recipe(path) for path in sorted(RECIPES.glob("*.yaml"))]


def page() -> str:
    """Return the text of the page."""
    found = recipes()
    return _HEAD + "".join(map(_arithmetic, found)) + _MEMORY + "".join(map(_memory, found))


def _arithmetic(each: Recipe) -> str:
    config, cluster = each.config, each.config.cluster
    policy = config.policy
    samples = policy.train_global_batch_size
    if isinstance(config, RolloutMasterConfig):
        samples = config.algorithm.num_prompts_per_step * config.algorithm.num_generations_per_prompt
    rows = samples * rows_per_sample(config)
    engine = policy.generation.engine if policy.generation else None
    size = engine.tensor_parallel_size * engine.pipeline_parallel_size if engine else 0
    engines = f"{cluster.num_nodes * cluster.gpus_per_node // size} x {size}" if size else ""
    tokens = rows * policy.max_total_sequence_length
    return _row(
        f"[{each.name}](../../{RECIPES.relative_to(REPOSITORY_ROOT)}/{each.name}.yaml)",
        f"{cluster.num_nodes} x {cluster.gpus_per_node}",
        mesh_text(policy, model_ranks(cluster, config.models)["policy"]) or "1",
        engines,
        f"{samples}{' pairs' if rows > samples else ''}",
        f"{samples // policy.train_global_batch_size}",
        f"{tokens / 1e6:.3g} M",
    )


def _memory(each: Recipe) -> str:
    (plan,) = each.forecast.groups.values()
    phases = [f"{sum(held.values()) / 2**30:.1f}" if (held := plan.moments.get(name)) else "" for name in _PHASES]
    tokens, generation = each.forecast.cache_tokens, each.config.policy.generation
    answers = f"{tokens / generation.engine.max_model_len:.0f}" if tokens and generation else ""
    host = sum(plan.host.values()) / 2**30
    return _row(each.name, *phases, answers, f"{host:.1f}" if host else "", f"{each.checkpoint / 1e9:.0f}")


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
