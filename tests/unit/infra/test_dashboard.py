"""The form of the Grafana dashboard; `test_monitoring_cpu` compares its metrics with those of a run."""

import json
import re

import pytest

from nemo_rl.config import REPOSITORY_ROOT
from nemo_rl.utils.log_backends.prometheus import exported_name

pytestmark = pytest.mark.fast

DASHBOARD = json.loads((REPOSITORY_ROOT / "infra/grafana/nemo_rl.json").read_text())


def test_panels_do_not_overlap_and_have_unique_numbers() -> None:
    places: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        for cell in ((x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + 8)):
            assert places.setdefault(cell, panel["title"]) == panel["title"]
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_every_query_is_of_the_chosen_runs_and_server() -> None:
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"source", "run"}
    for panel in DASHBOARD["panels"]:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${source}"}
        assert panel["targets"]
        for target in panel["targets"]:
            assert re.fullmatch(r'nemo_rl_\w+\{instance=~"\$run"(,group="train")?\}', target["expr"])


def test_labels_in_legends_are_those_that_are_served() -> None:
    served = {
        exported_name(f"ray/{name}")[0]: {kind for kind, _ in exported_name(f"ray/{name}")[1]}
        for name in (
            *("node.0.gpu.1.util", "node.0.gpu.1.mem_gb", "node.0.cpu_util", "node.0.mem_gb"),
            *("node.0.processes.mem_gb", "node.0.processes.cpu_cores"),
        )
    }
    used = {}
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert "instance" in labels, "several runs can be chosen"
            if labels := labels - {"instance"}:
                used[target["expr"].partition("{")[0]] = labels
    assert used == served


def test_shares_end_at_their_largest_value() -> None:
    ends = {
        panel["title"]: (panel["fieldConfig"]["defaults"]["unit"], panel["fieldConfig"]["defaults"].get("max"))
        for panel in DASHBOARD["panels"]
    }
    assert {end for unit, end in ends.values() if unit == "percentunit"} == {1}
    assert {end for unit, end in ends.values() if unit == "percent"} == {100}
    assert ends["Truncated answers"] == ("percentunit", 1)
