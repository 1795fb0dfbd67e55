"""Which optimizations run: the key `cluster.optimizations`, and the versions that each was written for."""

import logging
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from nemo_rl.config import SFTMasterConfig, load_config
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.optimizations import switch
from nemo_rl.optimizations.switch import OPTIMIZATIONS, differing_versions, installed_version, is_on
from nemo_rl.utils.errors import ConfigError
from tools import generate_optimization_table as tool

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "nemo_rl" / "optimizations"
SFT = ROOT / "examples" / "configs" / "sft_cpu.yaml"


@pytest.fixture(autouse=True)
def _decide_again() -> None:
    switch._fits.cache_clear()


@pytest.mark.parametrize("name", OPTIMIZATIONS)
def test_auto_takes_all_and_none_takes_none_with_the_installed_versions(name: str) -> None:
    assert is_on(name, "auto")
    assert not is_on(name, "none")


def test_a_list_takes_only_its_names() -> None:
    assert [name for name in OPTIMIZATIONS if is_on(name, ["ray_agents", "host_allocator"])] == [
        "ray_agents",
        "host_allocator",
    ]


@pytest.mark.parametrize(("library", "found"), [("ray", "2.61.0"), ("vllm", None), ("torch", "2.14.0")])
def test_another_version_switches_off_with_one_line(
    library: str, found: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(switch, "installed_version", lambda name: found if name == library else _wanted(name))
    for name, optimization in OPTIMIZATIONS.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert is_on(name, "auto") == is_on(name, [name]) == (library not in optimization.written_for)
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == (library in optimization.written_for)
        wanted = optimization.written_for.get(library)
        assert all(f"{name} is off" in line and f"{library} {wanted}, and {found or 'no'}" in line for line in lines)


def _wanted(library: str) -> str:
    return next(each.written_for[library] for each in OPTIMIZATIONS.values() if library in each.written_for)


def test_nothing_is_logged_about_what_the_run_does_not_ask_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(switch, "installed_version", lambda _: "0")
    assert not any(is_on(name, "none") or is_on(name, []) for name in OPTIMIZATIONS)
    assert caplog.records == []


def test_a_build_of_a_version_counts_as_the_version() -> None:
    assert installed_version("python") == "3.12"
    assert "+" not in (installed_version("torch") or "+")
    assert installed_version("no-such-package") is None


def test_each_was_written_for_the_pinned_versions() -> None:
    pinned = {requirement.name: requirement for requirement in _requirements()}
    for optimization in OPTIMIZATIONS.values():
        assert differing_versions(optimization) == []
        for library, version in optimization.written_for.items():
            assert library == "python" or str(pinned[library].specifier) == f"=={version}"


def _requirements() -> list[Requirement]:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["vllm"]]
    return [Requirement(text) for text in texts]


def test_each_file_of_the_package_belongs_to_an_optimization() -> None:
    named = {module for optimization in OPTIMIZATIONS.values() for module in optimization.modules}
    files = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    assert files == named | {"switch.py"}


def test_the_table_of_the_page_is_current() -> None:
    page = tool.PAGE.read_text(encoding="utf-8")
    assert page == tool.with_table(page), "run python tools/generate_optimization_table.py"
    assert all(f"| `{name}` |" in page for name in OPTIMIZATIONS)


def test_the_key_takes_names_and_refuses_unknown_ones() -> None:
    assert ClusterConfig().optimizations == "auto"
    for text, choice in (("none", "none"), ("[fork_server,ray_agents]", ["fork_server", "ray_agents"])):
        config = load_config(SFT, [f"cluster.optimizations={text}"], schema=SFTMasterConfig)
        assert config.cluster.optimizations == choice
    with pytest.raises(ConfigError, match=r"cluster\.optimizations.*fork_sever.*name some of: fork_server, ray_agents"):
        load_config(SFT, ["cluster.optimizations=[fork_sever]"], schema=SFTMasterConfig)
