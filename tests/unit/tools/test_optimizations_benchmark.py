"""The measurement of optimizations: which are on in each run, in which order, and the table of what each saves."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from nemo_rl.config import GRPOMasterConfig, load_config
from nemo_rl.optimizations.switch import OPTIMIZATIONS

ROOT = Path(__file__).resolve().parents[3]
MODULES = ("optimizations", "grpo_vs_trl", "workloads", "side_by_side", "make_tiny_chat_model")


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    """`tools/benchmarks/optimizations.py` as a module; it finds its neighbours as a script does."""
    sys.path.insert(0, str(ROOT / "tools" / "benchmarks"))
    import optimizations

    yield optimizations
    sys.path.remove(str(ROOT / "tools" / "benchmarks"))
    for name in MODULES:
        sys.modules.pop(name, None)


def test_each_variant_is_a_choice_that_the_configuration_accepts(tool: ModuleType) -> None:
    def chosen(variant: str) -> object:
        config = load_config(
            ROOT / "examples/configs/grpo_math_cpu.yaml", [tool.override_of(variant)], schema=GRPOMasterConfig
        )
        return config.cluster.optimizations

    assert (chosen("all"), chosen("none")) == ("auto", "none")
    for name in OPTIMIZATIONS:
        assert chosen(name) == [other for other in OPTIMIZATIONS if other != name]


def test_each_repeat_runs_every_variant_in_another_order(tool: ModuleType) -> None:
    variants = ["all", "fork_server", "none"]
    orders = [tool.in_turns(variants, repeat) for repeat in range(3)]
    assert all(sorted(order) == sorted(variants) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_the_table_has_medians_and_what_is_lost_without_each(tool: ModuleType, tmp_path: Path) -> None:
    def run(variant: str, repeat: int, step_s: float) -> object:
        return tool.Measured("1m", variant, repeat, step_s, 1.0, 10.0, 20.0, 900.0, 0.1)

    results = [run("all", 0, 0.1), run("all", 1, 0.2), run("all", 2, 0.9), run("fork_server", 0, 0.25)]
    lines = tool.table(results, "1m", ["all", "fork_server"]).splitlines()
    assert lines[2].startswith("| nothing | 0.2 | 1 | 10 | 20 | 900 |")
    assert lines[3].startswith("| `fork_server` | 0.25 (+25.0%) | 1 (+0.0%) |")
    assert tool.read_results(tmp_path / "none") == []


def test_without_names_all_that_can_have_an_effect_are_measured(tool: ModuleType) -> None:
    assert set(tool.parse_arguments([]).names) == OPTIMIZATIONS.keys() - {"garbage_collection"}
