"""A run whose ranks and engines have separate Python environments learns as one on the Python of the driver."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from example_runs import ExampleRun, StartExample, of_training, read_metrics

# Runs start in a separate folder, where a version manager may offer another `uv`, or none.
OWN_UV = Path(sys.base_prefix, "bin/uv")
UV = os.environ.get("UV") or (str(OWN_UV) if OWN_UV.exists() else shutil.which("uv"))
pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(UV is None, reason="uv is not here"),
]

OVERRIDES = ("grpo.max_num_steps=3", "grpo.val_period=2", "checkpointing.enabled=false")
# The ranks have no vLLM: any import of it would fail.
VENVS = ("cluster.venvs.policy.extras=[]", "cluster.venvs.generation.extras=[cpu]")
FIRST_STEP = r"First training step done ([\d.]+) s after the process started"


def libraries_of(process: psutil.Process) -> Iterator[Path]:
    """Return the shared libraries that a process has loaded."""
    yield from (Path(mapped.path) for mapped in process.memory_maps() if ".so" in mapped.path)


def places_of_torch(run: ExampleRun, *titles: str) -> set[Path]:
    """Return the site-packages folders from which processes have loaded torch."""
    libraries = (library for process in run.processes(*titles) for library in libraries_of(process))
    return {library.parents[2] for library in libraries if library.name == "libtorch_cpu.so"}


def test_ranks_and_engines_run_in_their_own_python_environments(start_example: StartExample, tmp_path: Path) -> None:
    plain = start_example("run_grpo.py", "grpo_math_cpu.yaml", *OVERRIDES, logs="plain")
    assert plain.finish() == 0, plain.log()[-3000:]
    expected = of_training(read_metrics(plain.log_dir))
    assert {("train", step, "loss") for step in (1, 2, 3)} <= expected.keys()

    folder, seconds = tmp_path / "venvs", {}
    for start in ("first", "cached"):
        environment = {"NEMO_RL_VENV_DIR": str(folder), "UV": str(UV)}
        overrides = (*OVERRIDES, *VENVS)
        run = start_example("run_grpo.py", "grpo_math_cpu.yaml", *overrides, logs=start, environment=environment)
        run.wait_for("validation after step 0", 1200)
        of_ranks = places_of_torch(run, "ray::PolicyRank")
        of_engines = places_of_torch(run, "ray::vllm_engine", "ray::GenerationWorker")
        assert run.finish() == 0, run.log()[-3000:]
        (policy,), (generation,) = folder.glob("policy-*"), folder.glob("generation-*")
        packages = "lib/python3.12/site-packages"
        assert (of_ranks, of_engines) == ({policy / packages}, {generation / packages})
        assert not (policy / packages / "vllm").exists() and (generation / packages / "vllm").exists()
        assert ("Making the environment" in run.log()) == (start == "first")
        assert of_training(read_metrics(run.log_dir)) == expected
        seconds[start] = re.search(FIRST_STEP, run.log())[1]
    print(f"first training step after {seconds['first']} s; where the environments are there, {seconds['cached']} s")
