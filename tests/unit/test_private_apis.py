"""Private names of other libraries: each use is on docs/development/private-apis.md, with a test that exists."""

import ast
import importlib.util
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from private_api_scan import scan, uses_in

from nemo_rl.models.generation.vllm.settings import LIBRARIES
from nemo_rl.optimizations import fork_server

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "development" / "private-apis.md"
HEADINGS = {
    "Ray": "ray",
    "vLLM": "vllm",
    "Transformers": "transformers",
    "torch": "torch",
    "Megatron Core": "megatron-core",
    "Hydra": "hydra-core",
}


@cache
def rows() -> list[tuple[list[str], str, str]]:
    """Uses, file and test of each row of the page."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `"):
            assert len(cells) == 5, f"not five cells: {line}"
            uses, file, _, _, test = cells
            found.append((re.findall(r"`([^`]+)`", uses), file.strip("`"), test.strip(" |`")))
    return found


def test_every_use_is_on_the_page_and_every_row_is_used() -> None:
    on_page = {(file, use) for uses, file, _ in rows() for use in uses}
    in_source = {(file, use) for file, uses in scan(ROOT / "nemo_rl").items() for use in uses}
    assert len(in_source) > 100
    assert sorted(in_source - on_page) == [], f"Explain each in a row of {PAGE.name}, or use a public name."
    assert sorted(on_page - in_source) == [], f"Remove each from {PAGE.name}: it is not used any more."


def test_the_tests_that_fail_first_exist() -> None:
    for _, file, test in rows():
        path, _, name = test.partition("::")
        assert (ROOT / path).exists(), f"{file}: {path} does not exist"
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in names, f"{file}: {path} has no {name}"


def test_every_row_says_why_and_what_happens_without_it() -> None:
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            assert all(cell.strip() for cell in line.strip("|").split(" | ")), line


def test_headings_have_the_pinned_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["vllm"]]
    texts += [text for text in project["optional-dependencies"]["mcore"] if text.startswith("megatron")]
    pins = {(requirement := Requirement(text)).name: str(requirement.specifier) for text in texts}
    headings = dict(re.findall(r"^## (\D+) ([\d.]+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert headings.pop("Python") in project["requires-python"]
    assert headings.keys() == HEADINGS.keys()
    for library, version in headings.items():
        assert pins[HEADINGS[library]] in (f"=={version}", f">={version}")


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("from ray._private import services\nservices.f()", {"ray._private.services.f"}),
        ("import ray\nray._private.worker.x = 1", {"ray._private.worker.x ="}),
        ("import torch\nsdk = torch._C\nsdk._g()", {"torch._C._g"}),
        ("import importlib\nm = importlib.import_module('torch.cuda')\nm.stream = None", {"torch.cuda.stream ="}),
        ("import torch\nsetattr(torch.cuda, name, None)", {"torch.cuda.* ="}),
        ("from torch import nn\nclass A(nn.Module):\n    def _apply(self): ...", {"._apply()"}),
        ("def f(model): return model._modules", {"._modules"}),
        ("def f(model): model.forward = None", {".forward ="}),
        ("def f(model): return getattr(model, '_hooks', None)", {"._hooks"}),
        ("NAME = '_read'\ndef f(model): setattr(model, NAME, None)", {"._read"}),
        ("logging.getLogger('ray._private.worker')", {'"ray._private.worker"'}),
        ("from vllm.v1.request import Request", {"vllm.v1.request.Request"}),
        ("from torch import nn\nclass A(nn.Module):\n    def f(self): self._own = self._own", set()),
        ("class A:\n    def _own(self): ...\ndef f(a): a._own()", set()),
        ("import os, sys\nos._exit(0)\nsys.excepthook = f", set()),
        ("import torch\ndef f(torch): torch.cuda = 1", set()),
        ("from nemo_rl.x import _y\n_y.z = 1", set()),
    ],
)
def test_the_scan_finds_uses_and_leaves_out_the_projects_own_names(source: str, uses: set[str]) -> None:
    assert uses_in(ast.parse(source)) == uses


def test_internal_attributes_of_vllm_are_found_in_its_folders_only() -> None:
    tree = ast.parse("def f(engine): return engine.model_executor")
    assert uses_in(tree, in_vllm=True) == {".model_executor"}
    assert uses_in(tree) == set()


SILENT = {
    "._heterogeneity_spec": "transformers/integrations/heterogeneity/configuration_utils",
    "._weight_conversions": "transformers/core_model_loading",
    "._can_record_outputs": "transformers/modeling_utils",
    "._accelerator_setAllocatorSettings": "torch/cuda/memory",
}
"""Names that the source reads with a default, so that no run fails without them, and files that mention them."""


def test_names_whose_loss_no_run_would_notice_exist() -> None:
    for name, file in SILENT.items():
        path = library_file(file)
        assert path is not None, file
        assert name.removeprefix(".") in path.read_text(encoding="utf-8"), f"{file} has no {name}"


def test_modules_that_the_fork_server_imports_exist() -> None:
    """It suppresses the error of a module that is missing, which the worker that needs it reports."""
    modules = [*fork_server.PRELOADED, *LIBRARIES]
    assert [module for module in modules if library_file(module.replace(".", "/")) is None] == []


def library_file(path: str) -> Path | None:
    """The file of a module, found without importing anything; `path` has slashes and no suffix."""
    spec = importlib.util.find_spec(path.split("/")[0])
    assert spec is not None and spec.origin is not None, f"{path.split('/')[0]} is not installed"
    place = Path(spec.origin).parents[1] / path
    return next((each for each in (place.with_suffix(".py"), place / "__init__.py") if each.exists()), None)
