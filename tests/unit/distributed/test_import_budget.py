"""Bound the modules that each kind of process imports, so that a new import at the top of a file is noticed."""

import json
import subprocess
import sys
from typing import NamedTuple

import pytest


class Budget(NamedTuple):
    """Limits on the imports of one kind of process.

    Attributes:
        imports: modules with which its work starts.
        modules: largest number of modules in all; a tenth more than when this was written.
        without: packages that it does not need.
    """

    imports: tuple[str, ...]
    modules: int
    without: frozenset[str]


DATA = frozenset({"datasets", "pandas"})
MODELS = frozenset({"transformers", "torch._dynamo", "sympy", "math_verify"})
ENGINES = frozenset({"vllm", "openai", "fastapi", "torch._inductor.lowering"})
LOADING = ("datasets", "streams", "packing", "processors")
"""Parts of `nemo_rl.data` that read, order and lay out rows."""
BUDGETS = {
    "command line": Budget(("nemo_rl.launch.command_line",), 600, frozenset({"torch", "ray", "transformers"})),
    "driver": Budget(
        ("nemo_rl.algorithms.grpo", "nemo_rl.algorithms.dpo"),
        4000,
        DATA | ENGINES | {"transformers.modeling_utils", "httpx"},
    ),
    "policy worker": Budget(
        ("nemo_rl.distributed.workers.process", "nemo_rl.models.policy.workers.rank", "nemo_rl.models.dtensor.backend"),
        3900,
        DATA | ENGINES,
    ),
    "environment actor": Budget(
        ("nemo_rl.environments.workers.client", "nemo_rl.environments.math_environment"),
        2100,
        DATA | ENGINES | MODELS,
    ),
    "engine actor": Budget(
        (
            "nemo_rl.distributed.workers.process",
            "nemo_rl.models.generation.worker",
            "nemo_rl.models.generation.vllm.engine",
        ),
        6100,
        # Requests and answers carry `data.model_rows` and `data.routed_experts`; no engine loads data or packs rows.
        DATA | {"nemo_rl.models.policy", "nemo_rl.models.dtensor", *(f"nemo_rl.data.{part}" for part in LOADING)},
    ),
}
COUNT = """
import importlib, json, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
print("MODULES", json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.long if kind.startswith(("policy", "engine")) else ()) for kind in BUDGETS],
)
def test_a_process_imports_no_more_than_its_budget(kind: str) -> None:
    budget = BUDGETS[kind]
    done = subprocess.run([sys.executable, "-c", COUNT, *budget.imports], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.rpartition("MODULES ")[2])
    assert not budget.without & set(found)
    assert len(found) <= budget.modules
