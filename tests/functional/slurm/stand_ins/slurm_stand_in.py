"""Imitate `sbatch`, `srun` and `scontrol` on one machine, as far as `ray.sub` uses them.

The environment variable SLURM_STAND_IN names a folder with `nodes.json`: {node: {field: value}}, as `scontrol show
node` prints them. There each job gets a folder `job<id>` with the pid of its batch shell and of its nodes' tasks, the
arguments of each `srun`, and a mark when it returns to the queue. A node is the set of processes that inherit
its SLURMD_NODENAME.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import IO

STATE = Path(os.environ.get("SLURM_STAND_IN", "/nonexistent"))
SETTLE_S = 0.05


def sbatch(arguments: list[str]) -> int:
    """Run `sbatch --wait [options] script`, again after each requeue; return its exit status."""
    [script] = [a for a in arguments if not a.startswith("--")]
    lines = Path(script).read_text().splitlines()
    given = [line.split()[1] for line in lines if line.startswith("#SBATCH ")] + arguments
    options = dict(re.findall(r"^--([\w-]+)=(.*)$", "\n".join(given), flags=re.MULTILINE))
    job_id = str(1 + len(list(STATE.glob("job*"))))
    folder = STATE / f"job{job_id}"
    folder.mkdir()
    (folder / "options.json").write_text(json.dumps(options))
    # Slurm runs a copy of the script in another folder.
    copy = shutil.copy(script, folder / "slurm_script")
    nodes = list(_nodes())[: int(options["nodes"])]
    environment = os.environ | {
        "SLURM_JOB_ID": job_id,
        "SLURM_JOB_NODELIST": ",".join(nodes),
        "SLURM_JOB_NUM_NODES": options["nodes"],
        "SLURM_SUBMIT_DIR": os.getcwd(),
        "SLURMD_NODENAME": nodes[0],
    }
    for restarts in range(4):
        if restarts:
            environment["SLURM_RESTART_COUNT"] = str(restarts)
        with open(f"slurm-{job_id}.out", "ab") as output:
            job = subprocess.Popen(
                ["bash", copy], env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )
        (folder / "batch.pid").write_text(str(job.pid))
        status = job.wait()
        _signal_all(f"SLURM_JOB_ID={job_id}", signal.SIGKILL)
        requeued = folder / "requeue"
        if not requeued.exists():
            return status
        requeued.unlink()
    raise AssertionError("The job goes back to the queue for ever.")


def srun(arguments: list[str]) -> int:
    """Run `srun --name=value... command...` with one task on each node; return the highest status."""
    if arguments == ["--help"]:
        print("  --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH" if os.environ.get("STAND_IN_PYXIS") else "Usage")
        return 0
    split = next(at for at, argument in enumerate(arguments) if not argument.startswith("-"))
    options = dict(re.findall(r"^--([\w-]+)=(.*)$", "\n".join(arguments[:split]), flags=re.MULTILINE))
    job = options.get("jobid") or os.environ["SLURM_JOB_ID"]
    nodes = (options.get("nodelist") or os.environ["SLURM_JOB_NODELIST"]).split(",")
    assert len(nodes) == int(options["nodes"]) == int(options["ntasks"]), arguments
    step = f"{os.getpid()}.{time.monotonic_ns()}"
    with (STATE / f"job{job}" / "sruns.jsonl").open("a") as record:
        record.write(json.dumps([*arguments[:split], arguments[split:]]) + "\n")

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda number, frame: _forward(step, number, frame))
    tasks: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
    for task, node in enumerate(nodes):
        given = {"SLURM_JOB_ID": job, "SLURMD_NODENAME": node, "SLURM_PROCID": str(task), "STAND_IN_STEP": step}
        process = subprocess.Popen(
            arguments[split:],
            env=_environment(options.get("export")) | given,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **_output(options.get("output"), task),
        )
        if "node_run" in arguments or "node_worker" in arguments:
            (STATE / f"job{job}" / f"{node}.pid").write_text(str(process.pid))
        tasks[task] = node, process
    return _await(tasks)


def _environment(export: str | None) -> dict[str, str]:
    """Return the whole environment of srun, or with --export the listed variables and those of Slurm or the image."""
    if export is None:
        return dict(os.environ)
    named = (entry.partition("=") for entry in export.split(","))
    listed = {name: value if given else os.environ.get(name, "") for name, given, value in named}
    return {name: os.environ[name] for name in ("PATH", "SLURM_STAND_IN")} | listed


def _output(pattern: str | None, task: int) -> dict[str, IO[bytes] | int]:
    """Open the output: with --output both streams of a task go to the file, but messages of srun do not."""
    if pattern is None:
        return {}
    values = {"t": str(task), "j": os.environ.get("SLURM_JOB_ID", ""), "%": "%"}
    name = re.sub(r"%(\d*)([tj%])", lambda found: values[found[2]].zfill(int(found[1] or 0)), pattern)
    return {"stdout": open(name, "wb"), "stderr": subprocess.STDOUT}  # noqa: SIM115 the task's


def _await(tasks: dict[int, tuple[str, subprocess.Popen[bytes]]]) -> int:
    highest = 0
    while tasks:
        for task, (node, process) in list(tasks.items()):
            status = process.poll()
            if status is None:
                continue
            del tasks[task]
            if status < 0:
                print(f"srun: error: {node}: task {task}: {signal.strsignal(-status)}", file=sys.stderr, flush=True)
            elif status > 0:
                print(f"srun: error: {node}: task {task}: Exited with exit code {status}", file=sys.stderr, flush=True)
            highest = max(highest, status if status >= 0 else 128 - status)
        time.sleep(SETTLE_S)
    return highest


def _forward(step: str, number: int, frame: FrameType | None) -> None:
    """Forward a signal sent to srun to all processes of its step."""
    _signal_all(f"STAND_IN_STEP={step}", number)


def _signal_all(variable: str, number: int) -> None:
    """Signal every process that has inherited a variable of this program, whatever its parent is."""
    wanted = {variable.encode(), f"SLURM_STAND_IN={STATE}".encode()}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted <= set((process / "environ").read_bytes().split(b"\0")) and int(process.name) != os.getpid():
                os.kill(int(process.name), number)
        except OSError:
            continue


def scontrol(arguments: list[str]) -> int:
    """Answer `show hostnames LIST`, `--oneliner show node LIST` and `requeue ID`."""
    match [argument for argument in arguments if not argument.startswith("--")]:
        case ["show", "hostnames", names]:
            print("\n".join(names.split(",")))
        case ["show", "node", names]:
            for name in names.split(","):
                fields = {"NodeName": name, **_nodes()[name], "State": "ALLOCATED"}
                print(*(f"{field}={value}" for field, value in fields.items()))
        case ["requeue", job]:
            (STATE / f"job{job}" / "requeue").touch()
        case _:
            print(f"no such request: {arguments}", file=sys.stderr)
            return 1
    return 0


def _nodes() -> dict[str, dict[str, str]]:
    return json.loads((STATE / "nodes.json").read_text())


COMMANDS = {"sbatch": sbatch, "srun": srun, "scontrol": scontrol}
