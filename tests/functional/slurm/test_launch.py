"""`tools/launch` and `tools/code_snapshot.sh`, in a separate checkout."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from slurm_jobs import REPOSITORY

RUN = """\
# ===== BEGIN CONFIG =====
NUM_NODES=2
STEPS_PER_RUN=30
MAX_STEPS=50
NUM_RUNS=$(((MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN))
NUM_MINUTES=240
# ===== END CONFIG =====
python train.py
"""
SBATCH = """\
#!/bin/bash
printf "%s|" "$PWD" "$COMMAND" "$GPUS_PER_NODE" "$PYTHONPATH" "$MOUNTS" "$RAY_SUB_REQUEUE_ON" "$@" >> $RECORD
echo >> $RECORD
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    for name in ("tools/launch", "tools/code_snapshot.sh", "ray.sub"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, root / name)
    (root / "runs").mkdir()
    (root / "runs/my run.sh").write_text("")
    for script in ("runs/small.sh", "more runs/small.sh", "more_runs/small.sh"):
        (root / script).parent.mkdir(exist_ok=True)
        (root / script).write_text(RUN)
    (root / "train.py").write_text("print(1)")
    (root / "gone.py").write_text("")
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"],
    ):
        subprocess.run(["git", *command], cwd=root, check=True)
    (root / "gone.py").unlink()
    (root / "untracked.sh").write_text(RUN)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text(SBATCH)
    (tmp_path / "bin/sbatch").chmod(0o755)
    return root


def run(checkout: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{checkout.parent}/bin{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "RECORD": f"{checkout.parent}/record"} | variables
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=30)


def test_a_script_is_submitted_from_a_snapshot_once_per_requested_run(checkout):
    where = {"ACCOUNT": "us", "PARTITION": "big", "CONTAINER": "image", "MOUNTS": "/data:/data"}
    done = run(checkout, "tools/launch", "runs/small.sh", **where)
    assert done.returncode == 0, done.stderr
    snapshot = checkout / "code_snapshots/runs-small"
    job = f"{snapshot}|bash runs/small.sh|8|{snapshot}|{snapshot}:{snapshot},/data:/data|none|"
    job += "--nodes=2|--account=us|--partition=big|--time=240|--job-name=runs-small|ray.sub|"
    record = checkout.parent / "record"
    assert record.read_text().splitlines() == [job] * 2
    subprocess.run(
        ["bash", snapshot / "continue.sh"],
        env=os.environ | {"PATH": f"{checkout.parent}/bin:/usr/bin:/bin", "RECORD": str(record)},
        check=True,
    )
    assert record.read_text().splitlines() == [job] * 3
    assert run(checkout, "tools/launch", "runs/small.sh", RAY_SUB_REQUEUE_ON="75 143", **where).returncode == 0
    assert record.read_text().splitlines()[3:] == [job.replace("|none|", "|75 143|")] * 2


def test_scripts_with_the_same_name_in_two_folders_are_two_experiments(checkout):
    where = {"ACCOUNT": "us", "PARTITION": "big"}
    done = run(checkout, "tools/launch", "runs/small.sh", "more runs/small.sh", **where)
    assert done.returncode == 0, done.stderr
    jobs = (checkout.parent / "record").read_text().splitlines()
    for job, name, command in (
        (jobs[0], "runs-small", "bash runs/small.sh"),
        (jobs[2], "more_runs-small", r"bash more\ runs/small.sh"),
    ):
        assert job.startswith(f"{checkout}/code_snapshots/{name}|{command}|") and f"--job-name={name}|" in job
    other = run(checkout, "tools/launch", "more_runs/small.sh", **where)
    assert other.returncode == 2
    assert "code_snapshots/more_runs-small is the snapshot of another script than more_runs/small.sh" in other.stderr


def test_a_script_that_differs_from_its_snapshot_is_refused(checkout):
    where = {"ACCOUNT": "us", "PARTITION": "big"}
    assert run(checkout, "tools/launch", "runs/small.sh", DRYRUN="1", **where).returncode == 0
    (checkout / "runs/small.sh").write_text(RUN.replace("240", "60"))
    done = run(checkout, "tools/launch", "runs/small.sh", **where)
    assert done.returncode == 2
    kept = checkout / "code_snapshots/runs-small/runs/small.sh"
    assert f"runs/small.sh is not the one of its snapshot, {kept}, which would run" in done.stderr
    assert not (checkout.parent / "record").exists()


def test_a_snapshot_keeps_the_code_of_its_first_start(checkout):
    first = run(checkout, "tools/code_snapshot.sh", "one")
    assert first.returncode == 0, first.stderr
    (checkout / "train.py").write_text("print(2)")
    assert run(checkout, "tools/code_snapshot.sh", "one").stdout == first.stdout
    snapshot = Path(first.stdout.strip())
    assert snapshot == checkout / "code_snapshots/one"
    assert (snapshot / "train.py").read_text() == "print(1)"
    assert not (snapshot / "untracked.sh").exists() and not (snapshot / "gone.py").exists()
    other = run(checkout, "tools/code_snapshot.sh", "two").stdout.strip()
    assert (Path(other) / "train.py").read_text() == "print(2)"


@pytest.mark.parametrize(
    ("arguments", "variables", "answer"),
    [
        (["runs/my run.sh"], {}, "has no lines between"),
        (["untracked.sh"], {}, "is no file that git tracks"),
        (["runs/small.sh"], {"ACCOUNT": ""}, "ACCOUNT and PARTITION of Slurm have to be set"),
        ([], {}, "no script is given"),
    ],
    ids=["no config", "untracked", "no account", "nothing"],
)
def test_invalid_submissions_are_refused_with_advice(checkout, arguments, variables, answer):
    done = run(checkout, "tools/launch", *arguments, **({"ACCOUNT": "us", "PARTITION": "big"} | variables))
    assert done.returncode == 2
    assert answer in done.stderr
    assert not (checkout.parent / "record").exists()


def test_concurrent_launches_share_one_snapshot(checkout):
    path = f"{checkout.parent}/bin{os.pathsep}{os.environ['PATH']}"
    command = [checkout / "tools/code_snapshot.sh", "one"]
    asked = [
        subprocess.Popen(command, env=os.environ | {"PATH": path}, stdout=subprocess.PIPE, text=True) for _ in range(6)
    ]
    answers = {(process.communicate()[0], process.returncode) for process in asked}
    assert answers == {(f"{checkout}/code_snapshots/one\n", 0)}
    assert [path.name for path in (checkout / "code_snapshots").iterdir()] == ["one"]
    assert not list((checkout / "code_snapshots/one").glob(".partial*"))
