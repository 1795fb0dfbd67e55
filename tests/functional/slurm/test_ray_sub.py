"""`ray.sub` with replacements for Slurm and Ray: what it starts, where it writes, and how it ends.

The jobs run side by side, because most of their time is waiting.
"""

import re
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator

import pytest
from slurm_jobs import (
    REPOSITORY,
    SCRIPT,
    STAND_IN_RAY,
    SlurmJob,
    script_defaults,
    search_path,
    slurm_environment,
    submit,
)

SAVES_AT_SIGTERM = """
set -e
echo "with restart ${SLURM_RESTART_COUNT:-0}"
if [[ -n ${SLURM_RESTART_COUNT:-} ]]; then echo "goes on"; exit 0; fi
# As under `uv run`: what is below the process that handles the signal must not get it.
bash -c '
  bash -c "trap \\"echo a loader got it\\" TERM; while :; do sleep 0.1; done" &
  trap "sleep 0.5; echo saved; kill -KILL $!; exit 75" TERM
  echo trains
  wait'
"""

ODD = r"""printf '%s\n' "two  spaces" 'single $HOME' "dou\"ble" back\\slash '*' "100%j" # a comment
echo "line 2
of two"; cat << 'END'
here's "one"
END
cat; echo "$PWD"; (exit 3)"""
ODD_FOLDER = """my runs 100%j 'q' "d" $HOME `x`, a;b"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


JOBS = {
    "passes": {
        "nodes": "3",
        "COMMAND": 'echo "head $SLURMD_NODENAME, Ray $RAY_ADDRESS, token $RAY_AUTH_TOKEN_PATH, $SETUP_DONE"\nexit 7',
        "SETUP_COMMAND": 'export SETUP_DONE=yes$UNSET; echo "set up on $SLURMD_NODENAME"',
        "GPUS_PER_NODE": "4",
        "GRES_node1": "gpu:h100:4(S:0-1,3),nic:2",
        "CPUS_node1": "1",
        "DEDICATED_RAY_HEAD": "1",
        "STAND_IN_RAY_FAILS_ONCE": "node3",
        "RAY_SUB_DEBUG_ENV": "1",
        "SOME_API_KEY": "open\nUP=sesame",
        "SANDBOX_ENV_VARS": "PLAIN=sesame",
        "BASIC_AUTH": "sesame",
    },
    "odd": {"folder": ODD_FOLDER, "nodes": "1", "COMMAND": ODD, "PORT": "", "RAY_SUB_REQUEUE_ON": "", "MOUNTS": ""},
    "never_joins": {"COMMAND": "echo started", "STAND_IN_RAY_HANGS": "node2", "RAY_SUB_JOIN_TIMEOUT_S": "10"},
    "stopped_early": {"COMMAND": "echo started", "STAND_IN_RAY_HANGS": "node2",
                      "RAY_SUB_REQUEUE_ON": "75 143", "RAY_SUB_MAX_REQUEUES": "1"},
    "no_sandbox": {"COMMAND": "echo started", "SANDBOX_CONTAINER": "sandbox.sqsh", "SANDBOX_COMMAND": "sleep 600",
                   "NEMO_SKILLS_SANDBOX_PORT": str(free_port()), "STAND_IN_PYXIS": "1"},
    "preempted": {"COMMAND": SAVES_AT_SIGTERM},
    "stubborn": {"COMMAND": "trap : TERM; echo trains; for i in {1..300}; do sleep 1; done",
                 "RAY_SUB_STOP_TIMEOUT_S": "1"},
    "node_dies": {"nodes": "3",
                  "COMMAND": 'until grep -s error "$BASE_LOG_DIR/1-logs/srun.log"; do sleep 0.1; done; exit 9'},
    "idle": {"GPUS_PER_NODE": "1", "GRES_node1": "gpu:1"},
    "container": {"COMMAND": ": < /dev/tcp/127.0.0.1/$NEMO_SKILLS_SANDBOX_PORT && echo reached",
                  "CONTAINER": "image.sqsh", "MOUNTS": "/data:/data", "STAND_IN_PYXIS": "1",
                  "UV_CACHE_DIR_OVERRIDE": "/cache", "RAY_DEBUG": "legacy",
                  "SANDBOX_CONTAINER": "sandbox.sqsh", "SANDBOX_ENV_VARS": "GREETING=hello", "SOME_API_KEY": "sesame",
                  "SANDBOX_COMMAND": "env; exec python3 -m http.server --bind 127.0.0.1 $NEMO_SKILLS_SANDBOX_PORT",
                  "NEMO_SKILLS_SANDBOX_PORT": str(free_port()),
                  "PATH": search_path(STAND_IN_RAY / "bin")},
}  # fmt: skip


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SlurmJob]]:
    running = {}
    for name, variables in JOBS.items():
        given = dict(variables)
        nodes = int(given.pop("nodes", "2"))
        folder = tmp_path_factory.mktemp(name) / given.pop("folder", "")
        folder.mkdir(exist_ok=True)
        running[name] = submit(folder, nodes, **given)
    yield running
    for job in running.values():
        job.close()


def test_the_exit_status_passes_through_and_logs_are_where_the_guide_says(jobs):
    job = jobs["passes"]
    assert job.finish() == 7, job.output()
    assert f"head node1, Ray 127.0.0.2:1200, token {job.log_dir()}/.ray_auth_token" in job.log("ray-driver.log")
    for log, node in (("ray-head.log", "node1"), ("ray-worker-000.log", "node2"), ("ray-worker-001.log", "node3")):
        assert f"set up on {node}" in job.log(log)
        hidden = {"COMMAND", "SETUP_COMMAND", "SANDBOX_ENV_VARS", "SOME_API_KEY", "BASIC_AUTH", "RAY_AUTH_TOKEN_PATH"}
        assert {f"{name}=(hidden)" for name in hidden} | {"GPUS_PER_NODE=4"} <= set(job.log(log).splitlines())
        assert "sesame" not in job.log(log) and "exit 7" not in job.log(log)
    assert "attempt 2 of 20" in job.log("ray-worker-001.log")
    assert "exit 7" in job.log("driver_command.sh") and "SETUP_DONE" in job.log("setup_command.sh")
    assert stat.S_IMODE((job.log_dir() / ".ray_auth_token").stat().st_mode) == 0o600
    assert {"STARTED_RAY_HEAD", "READY", "ENDED"} <= {path.name for path in job.log_dir().iterdir()}
    assert not (job.folder / "slurm/job1/requeue").exists()


def test_quotes_spaces_and_newlines_of_a_command_and_a_folder_are_kept(jobs):
    job = jobs["odd"]
    assert job.finish() == 3, job.output()
    lines = ["two  spaces", "single $HOME", 'dou"ble', "back\\slash", "*", "100%j", "line 2", "of two", 'here\'s "one"']
    assert job.log("ray-driver.log").splitlines() == [*lines, str(job.folder)]


def test_ports_and_resources_of_head_and_workers(jobs):
    job = jobs["passes"]
    job.finish()
    head, worker = job.ray_arguments("node1"), job.ray_arguments("node2")
    assert {"--head", "--port=1200", "--node-ip-address=127.0.0.2", "--num-gpus=0", "--num-cpus=0"} <= set(head)
    assert {"--address=127.0.0.2:1200", "--node-ip-address=127.0.0.3", "--num-gpus=4", "--num-cpus=1"} <= set(worker)
    assert '--resources={"worker_units": 0, "slurm_managed_ray_cluster": 1, "ray_head": 1}' in head
    assert '--resources={"worker_units": 4, "slurm_managed_ray_cluster": 1}' in worker
    for name, port in (("node-manager", 1301), ("object-manager", 1303), ("dashboard-agent-listen", 1311)):
        assert f"--{name}-port={port + 1}" in head and f"--{name}-port={port}" in worker
    steps = [call for call in job.sruns() if "ray-node.sh" in str(call)]
    assert len(steps) == 3 and all({"--gres=gpu:4", "--immediate=300"} <= set(call[:-1]) for call in steps)


def test_the_nvlink_domain_of_a_node_is_read_from_its_gpus(tmp_path):
    script = SCRIPT.read_text()
    function = script[script.index("node_nvlink_domain()") : script.index("node_start_ray()")]
    tool = tmp_path / "nvidia-smi"

    def domain(uuid: str) -> str:
        fabric = f"        State           : Completed\n        CliqueId : 3\n        ClusterUUID : {uuid}\n"
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n    Fabric\n{fabric}    Processes\nEND\n")
        tool.chmod(0o755)
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        command = ["bash", "-euo", "pipefail", "-c", f"{function}\nnode_nvlink_domain"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    uuid = "7a2f8d10-0b1c-4c2e-9c55-3f0d2f6f9a11"
    assert domain(uuid) == f"{uuid}_3"
    assert domain("00000000-0000-0000-0000-000000000000") == domain("N/A") == ""
    tool.unlink()
    command = ["bash", "-euo", "pipefail", "-c", f"{function}\nnode_nvlink_domain"]
    assert subprocess.run(command, env={"PATH": "/nowhere"}, capture_output=True, executable="/bin/bash").stdout == b""


def test_a_signal_is_forwarded_and_the_job_resumes_after_requeue(jobs):
    job = jobs["preempted"]
    job.wait_for(lambda: "trains" in job.log("ray-driver.log"))
    job.signal_batch_shell(signal.SIGUSR1)
    job.signal_batch_shell(signal.SIGTERM)
    assert job.finish() == 0, job.output()
    assert job.log("ray-driver.log").splitlines() == ["with restart 0", "trains", "saved"]
    assert job.log("ray-driver.log", restarts=1).splitlines() == ["with restart 1", "goes on"]
    assert "COMMAND has ended with status 75" in job.output() and "goes back to the queue" in job.output()


def test_a_job_stopped_while_nodes_start_is_requeued_if_requested(jobs):
    job = jobs["stopped_early"]
    for restarts in (0, 1):
        job.wait_for(lambda n=restarts: "waits for its switch" in job.log("ray-worker-000.log", n))
        job.signal_batch_shell(signal.SIGUSR1)
    assert job.finish() == 143, job.output()
    assert "The job has started again 1 times (RAY_SUB_MAX_REQUEUES)" in job.output()


def test_a_node_that_dies_before_the_sandboxes_are_ready_ends_the_job(jobs):
    job = jobs["no_sandbox"]
    job.wait_for(lambda: "Ray has 2 nodes" in job.output())
    job.kill_task("node2")
    assert job.finish() == 1, job.output()
    assert "Node node2 has ended (node2: task 0: Killed); without it the job cannot go on." in job.output()


def test_a_command_that_does_not_stop_is_killed_and_not_repeated(jobs):
    job = jobs["stubborn"]
    job.wait_for(lambda: "trains" in job.log("ray-driver.log"))
    job.signal_batch_shell(signal.SIGTERM)
    assert job.finish() == 137, job.output()
    assert "has not ended within 1 s" in job.output()
    assert not job.log_dir(restarts=1).exists()


def test_a_node_that_dies_ends_the_job_and_is_named(jobs):
    job = jobs["node_dies"]
    job.wait_for(lambda: "COMMAND runs" in job.output())
    job.kill_task("node2")
    assert job.finish() == 9, job.output()
    assert "Node node2 has ended (node2: task 0: Killed); without it the job cannot go on." in job.output()
    assert "node2 (127.0.0.3) starts Ray as worker" in job.output().partition("last lines")[2]


def test_without_a_command_shells_attach(jobs):
    job = jobs["idle"]
    job.wait_for(lambda: (job.folder / "1-attach.sh").exists() and "idle" in job.output())
    shown = 'echo "$SLURMD_NODENAME $RAY_ADDRESS"; exit 5'
    for arguments, node in (((), "node1"), (("0",), "node1"), (("1",), "node2")):
        done = job.attach(*arguments, command=shown)
        assert (done.returncode, done.stdout) == (5, f"{node} 127.0.0.2:1200\n")
    assert job.attach("2").stderr == "node 2 is not one of 0 to 1\n"
    assert job.attach("1").returncode == 0
    assert {"--pty", "--gres=gpu:1"} <= set(job.sruns()[-1][:-1])
    job.signal_batch_shell(signal.SIGTERM)
    assert job.finish() == 0, job.output()
    assert not (job.folder / "1-attach.sh").exists()


def test_a_container_is_started_on_each_node_and_joined_by_the_command(jobs):
    job = jobs["container"]
    assert job.finish() == 0, job.output()
    canary, *nodes, driver = job.sruns()
    sandbox, head, worker = sorted(nodes, key=lambda call: ("node_run" in call[-1]) + 2 * ("node_worker" in call[-1]))
    assert not any("--container" in str(option) for option in canary)
    for call, name in ((head, "ray-head"), (worker, "ray-worker")):
        assert {f"--container-name={name}", "--container-image=image.sqsh"} <= set(call[:-1])
        assert f"--container-mounts={job.log_dir()}:{job.log_dir()},/data:/data,/cache:/cache" in call
    assert "--container-name=ray-head" in driver and "--container-image=image.sqsh" not in driver
    assert {"--ray-debugger-external", "--num-cpus=2"} <= set(job.ray_arguments("node2"))
    assert {"--container-image=sandbox.sqsh", "--no-container-mount-home", "--gres=none"} <= set(sandbox[:-1])
    assert "--container-mounts" not in str(sandbox)
    assert job.log("ray-driver.log") == "reached\n"
    assert "GREETING=hello" in job.log("sandbox-000.log") and "sesame" not in job.log("sandbox-000.log")
    assert {"SANDBOX_READY_node1", "SANDBOX_READY_node2"} <= {path.name for path in job.log_dir().iterdir()}


@pytest.mark.parametrize(
    ("variables", "answer"),
    [
        ({"GPUS_PER_NODE": "many"}, "GPUS_PER_NODE='many' is no number"),
        ({"RAY_SUB_MAX_REQUEUES": "-1"}, "RAY_SUB_MAX_REQUEUES='-1' is no number"),
        ({"PORT": "01200"}, "PORT='01200' is no number"),
        ({"CPUS_PER_WORKER": "all"}, "CPUS_PER_WORKER='all' is no number"),
        ({"DEDICATED_RAY_HEAD": "true"}, "DEDICATED_RAY_HEAD='true' is neither 0 nor 1"),
        ({"RAY_SUB_REQUEUE_ON": "75,143"}, "RAY_SUB_REQUEUE_ON='75,143' is neither none nor exit statuses"),
        (
            {"CONTAINER": "image.sqsh", "STAND_IN_PYXIS": "1", "BASE_LOG_DIR": "/a:b"},
            "/a:b/1-logs cannot be mounted: a comma or colon",
        ),
        ({"VIRTUAL_ENV": "/nowhere"}, "CONTAINER is unset and /nowhere/bin/ray does not exist"),
        ({"CONTAINER": "image.sqsh"}, "this Slurm has no --container-image"),
        ({"GPUS_PER_NODE": "8", "GRES_node2": "gpu:a100:6(S:0-1)"}, "node node2 has 6 GPUs (Gres), GPUS_PER_NODE=8"),
        ({"SLURM_JOB_NUM_NODES": "3"}, "Slurm gave 3 nodes but names node1 node2"),
        ({"DEDICATED_RAY_HEAD": "1", "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NUM_NODES": "1"}, "needs a second node"),
        ({"SLURM_JOB_ID": ""}, "this is no Slurm job; submit it"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value),
)
def test_invalid_settings_are_refused_before_nodes_start(tmp_path, variables, answer):
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node1,node2", "SLURM_JOB_NUM_NODES": "2"}
    environment = slurm_environment(tmp_path, **(job | {"SLURM_SUBMIT_DIR": str(tmp_path)} | variables))
    done = subprocess.run(["bash", SCRIPT], env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert answer in done.stderr


def test_a_folder_that_a_node_does_not_see_is_named(tmp_path):
    """A script named `cat` on one node makes that node read another file."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/cat").write_text('#!/bin/sh\n[ "$SLURMD_NODENAME" = node2 ] && exit 1\nexec /bin/cat "$@"\n')
    (tmp_path / "bin/cat").chmod(0o755)
    (tmp_path / "bin/sleep").symlink_to("/bin/true")
    job = submit(tmp_path, COMMAND="echo started", PATH=search_path(tmp_path / "bin"))
    assert job.finish() == 1
    assert re.search(r"node node2 does not see \S*/1-logs as this node does\. BASE_LOG_DIR=", job.output())


def test_a_worker_that_never_joins_is_named_with_the_end_of_its_log(jobs):
    job = jobs["never_joins"]
    assert job.finish() == 1
    assert "Within 10 s (RAY_SUB_JOIN_TIMEOUT_S) these of 2 nodes did not join Ray: node2\n" in job.output()
    assert "node2 waits for its switch" in job.output()
    assert job.log("ray-driver.log") == ""


def test_the_guide_lists_the_variables_of_the_script():
    table = (REPOSITORY / "docs/machines/slurm.md").read_text().partition("\n## Variables\n")[2].partition("\n## ")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, flags=re.MULTILINE))
    defaults = script_defaults()
    assert documented.keys() == defaults.keys()
    assert len(defaults) > 25
    assert defaults.pop("BASE_LOG_DIR") == "${SLURM_SUBMIT_DIR:-$PWD}"
    assert documented.pop("BASE_LOG_DIR") == "the folder of `sbatch`"
    assert documented == {name: f"`{value}`" if value else "" for name, value in defaults.items()}
