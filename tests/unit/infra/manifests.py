"""Parse the manifests of infra/kubernetes for tests."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "infra/kubernetes"
JOBS = [FOLDER / "cpu/rayjob.yaml", FOLDER / "gpu/rayjob.yaml"]
PROGRAM = "infra/kubernetes/run_driver.sh"


def manifests(path: Path) -> list[dict[str, Any]]:
    """Return all manifests in a file, or in the files of a folder."""
    found = sorted(path.rglob("*.yaml")) if path.is_dir() else [path]
    return [item for file in found for item in yaml.safe_load_all(file.read_text(encoding="utf-8"))]


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [item for item in manifests(FOLDER) if item["kind"] == kind]


def command(job: dict[str, Any]) -> list[str]:
    """Return the command of a RayJob, after the program that writes its process id."""
    program, *words = shlex.split(job["spec"]["entrypoint"])
    assert program == PROGRAM
    return words


def groups(cluster: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Return the number of pods and the pod spec of the head and of each worker group."""
    yield 1, cluster["headGroupSpec"]["template"]["spec"]
    for group in cluster.get("workerGroupSpecs", []):
        yield group["replicas"], group["template"]["spec"]


def bytes_or_count(quantity: str | int) -> float:
    """Convert a Kubernetes quantity to a number."""
    factors = {"m": 1e-3, "Gi": 2.0**30, "Mi": 2.0**20, "Ti": 2.0**40}
    text = str(quantity)
    unit = next((unit for unit in factors if text.endswith(unit)), "")
    return float(text.removesuffix(unit)) * factors.get(unit, 1.0)
