"""Agent programs on packages that only their own processes have: langgraph, and environments of verifiers 0.4."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from example_runs import StartExample, read_metrics

from nemo_rl.config import VenvConfig
from nemo_rl.utils.errors import VenvError
from nemo_rl.utils.venvs import create_local_venv

ROOT = Path(__file__).resolve().parents[2]
# Runs start in a separate folder, where a version manager may offer another `uv`, or none.
OWN_UV = Path(sys.base_prefix, "bin/uv")
UV = os.environ.get("UV") or (str(OWN_UV) if OWN_UV.exists() else shutil.which("uv"))
pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(UV is None, reason="uv is not here"),
]

LANGGRAPH = ("langgraph==1.2.22", "langchain-openai==1.7.4")
VERIFIERS = ("verifiers==0.4.0", "openai==2.54.0", "mcp==2.0.0", "mcp-types==2.0.0")
ENV = "{taskset: {id: verifiers_products, split: %s}, agent: {runtime: {type: subprocess}, max_turns: 3}}"
OVERRIDES = {
    LANGGRAPH: ("env.agent.program=langgraph_agent.solve",),
    VERIFIERS: (
        "data.default.processor=episode_data_processor",
        "data.train={dataset_name: episodes}",
        "data.validation={dataset_name: episodes}",
        "env.agent.program=nemo_rl.agents.verifiers_program.VerifiersProgram",
        f"+env.agent.kwargs.env={ENV % 'train'}",
        f"+env.agent.kwargs.validation_env={ENV % 'validation'}",
        "env.agent.grader=null",
    ),
}


def python_with(packages: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the Python of an environment of programs with packages of uv's cache; skip where they are not in it."""
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(folder))
    monkeypatch.setenv("UV", str(UV))
    with pytest.MonkeyPatch.context() as offline:
        offline.setenv("UV_OFFLINE", "1")
        try:
            return create_local_venv(VenvConfig(packages=list(packages)), "agent", False, timeout_s=300.0)
        except VenvError as error:
            if "network was disabled" in str(error):
                pytest.skip(f"uv's cache lacks one of {', '.join(packages)}, or a package that they need")
            raise


@pytest.mark.parametrize("packages", [LANGGRAPH, VERIFIERS], ids=["langgraph", "verifiers"])
def test_the_policy_learns_to_use_the_tool_of_a_program(
    packages: tuple[str, ...], start_example: StartExample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three standard errors of a share of 128 problems are 0.12."""
    python_with(packages, tmp_path / "venvs", monkeypatch)
    run = start_example(
        "run_grpo.py",
        "grpo_agent_cpu.yaml",
        *OVERRIDES[packages],
        f"cluster.venvs.agent.packages={json.dumps(packages)}",
        "grpo.max_num_steps=10",
        "checkpointing.enabled=false",
        environment={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/functional'}"},
    )
    assert run.finish(800) == 0, run.log()[-3000:]
    metrics = read_metrics(run.log_dir)
    for step in range(1, 11):
        assert metrics["train", step, "num_reward_errors"] == 0, run.log()[-3000:]
        assert metrics["train", step, "token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["train", 10, "agent/calculator_calls"] > 0.5
    before, after = (metrics["validation", step, "accuracy"] for step in (0, 10))
    assert after > before + 0.2


def test_episodes_of_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unit tests that need the package, in a Python that has it."""
    python = python_with(VERIFIERS, tmp_path / "venvs", monkeypatch)
    tests = "tests/unit/environments/adapters/test_verifiers_program.py"
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-k", "package or played or endpoint", tests]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "8 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
