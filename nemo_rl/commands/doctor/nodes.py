"""List the checks of one machine, which run here or in one Ray task per node of a cluster."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO

from nemo_rl.commands.doctor.checks import Check, Finding, NodeRequest, Status, ok, skipped
from nemo_rl.commands.doctor.machine import (
    check_gpus,
    check_host_memory,
    check_open_files,
    check_ports,
    check_processor,
    check_ray_start,
    check_sandbox,
    check_shared_memory,
    check_temporary_files,
)
from nemo_rl.commands.doctor.versions import check_versions
from nemo_rl.config import count_gpus
from nemo_rl.distributed.ranks.rendezvous import bind_free_port

DEADLINE_S = 150.0
_JOIN_S = 60.0
_GRACE_S = 10.0
_ELEMENTS = 1 << 22
"""Number of float32 values that the ranks sum: 16 MB."""
_ANSWER = "MB added up in"
_GPU_VARIABLE = "NRL_DOCTOR_RANK_ON_GPU"
_ADVICE = (
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME must name interfaces that exist (ip -brief address); NCCL needs shared "
    "memory; with NCCL_DEBUG=INFO it logs its attempts."
)


def check_exchange(request: NodeRequest, num_gpus: int) -> Finding:
    """Start as many ranks as the run will have on this machine, and sum a tensor over them.

    Args:
        request: the run's requirements of this machine.
    """
    on_gpu = bool(num_gpus) if request.uses_gpu is None else request.uses_gpu
    num_ranks = request.ranks or (num_gpus if on_gpu else 2)
    if num_ranks < 2:
        return skipped("the run has one rank on this machine")
    if on_gpu and num_ranks > num_gpus:
        return skipped(f"{num_ranks} ranks need {num_ranks} GPUs, this machine shows {num_gpus}")
    with bind_free_port("127.0.0.1", None, None) as bound:
        port = bound.getsockname()[1]
    common = {"WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, _GPU_VARIABLE: int(on_gpu)}
    missing, said = _run([common | {"RANK": rank} for rank in range(num_ranks)])
    name = f"{'NCCL' if on_gpu else 'gloo'} between {num_ranks} processes"
    if not missing:
        return ok(f"{name}: {next(line for line in said[0] if _ANSWER in line)}")
    errors = [f"rank {rank} {how}: {(said[rank] or ['it said nothing'])[-1]}" for rank, how in missing.items()]
    details = "\n".join(line for rank in missing for line in (f"rank {rank} said:", *said[rank]))
    return Finding(Status.FAILED, f"{name}: {errors[0]}", _ADVICE, details)


def _run(variables: Sequence[dict[str, object]]) -> tuple[dict[int, str], list[list[str]]]:
    """Run one rank with each environment, and return the failures (as in `_await`) and each rank's output lines.

    The output goes to files: with NCCL_DEBUG=INFO it is more than a pipe without a reader holds.
    """
    with ExitStack() as opened:
        files = [opened.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in variables]
        ranks = [_start(each, file) for each, file in zip(variables, files, strict=True)]
        try:
            missing = _await(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.communicate()
        for file in files:
            file.seek(0)
        return missing, [file.read().strip().splitlines() for file in files]


def _start(variables: dict[str, object], output: IO[str]) -> subprocess.Popen[bytes]:
    environment = os.environ | {name: str(value) for name, value in variables.items()} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "nemo_rl.commands.doctor.nodes"]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT)


def _await(ranks: Sequence[subprocess.Popen[bytes]]) -> dict[int, str]:
    """Wait until all ranks have ended or one has failed, and return a reason for each failed or unfinished rank."""
    end = time.monotonic() + DEADLINE_S - _GRACE_S
    while time.monotonic() < end and not any(p.poll() for p in ranks) and any(p.poll() is None for p in ranks):
        time.sleep(0.05)
    failed = {rank: f"ended with status {process.poll()}" for rank, process in enumerate(ranks) if process.poll()}
    return failed or {rank: "did not answer in time" for rank, process in enumerate(ranks) if process.poll() is None}


def _end_with_the_doctor() -> None:
    """Exit when the input ends, which means that the doctor has ended."""
    os.read(0, 1)  # not with `sys.stdin`: the interpreter needs its lock at exit
    os._exit(1)


def main() -> None:
    """Run one rank: join, sum a tensor, and on rank 0 print how long that took."""
    threading.Thread(target=_end_with_the_doctor, daemon=True).start()
    import torch
    import torch.distributed as dist

    from nemo_rl.distributed.ranks.process_group import destroy_process_group, init_process_group
    from nemo_rl.host.device import device_for

    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = device_for(os.environ[_GPU_VARIABLE] == "1")
    place = device.activate(rank)
    init_process_group(device, _JOIN_S, rank)
    numbers = torch.full((_ELEMENTS,), float(rank + 1), device=place)
    dist.all_reduce(numbers[:1].clone())
    device.synchronize()
    started = time.perf_counter()
    dist.all_reduce(numbers)
    device.synchronize()
    seconds = time.perf_counter() - started
    expected = num_ranks * (num_ranks + 1) / 2
    if not bool((numbers == expected).all()):
        sys.exit(f"the sum is {numbers.min().item():g} to {numbers.max().item():g}, not {expected:g}")
    if rank == 0:
        sys.stdout.write(f"{numbers.nbytes / 1e6:.0f} {_ANSWER} {seconds * 1e3:.0f} ms\n")
    destroy_process_group()


if __name__ == "__main__":
    main()


def _exchange(request: NodeRequest) -> Finding:
    return check_exchange(request, count_gpus())


NODE_CHECKS: list[Check[NodeRequest]] = [
    Check("versions", check_versions),
    Check("gpus", check_gpus),
    Check("processor", check_processor),
    Check("host memory", check_host_memory),
    Check("shared memory", check_shared_memory),
    Check("open files", check_open_files),
    Check("temporary files", check_temporary_files),
    Check("sandbox", check_sandbox),
    Check("ray start", check_ray_start),
    Check("ports", check_ports),
    Check("exchange", _exchange, DEADLINE_S, needs=("ray start",)),
]

NODES = "nodes"
"""Name of the finding for a node that does not answer."""
_START_S = 60.0
NODES_DEADLINE_S = _START_S + sum(check.deadline_s for check in NODE_CHECKS)
"""Seconds until a node's task must have started and finished all checks."""
