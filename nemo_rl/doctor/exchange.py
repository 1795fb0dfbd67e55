"""Checks that processes of one machine can exchange tensors, as the ranks of a run will: gloo on CPUs, NCCL on GPUs.

python -m nemo_rl.doctor.exchange     one rank, with the environment of `process_group.init_process_group`
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from nemo_rl.distributed.rendezvous import bind_free_port
from nemo_rl.doctor.findings import Finding, Status, ok, skipped
from nemo_rl.doctor.requests import NodeRequest

DEADLINE_S = 150.0
_JOIN_S = 60.0
_GRACE_S = 10.0
_ELEMENTS = 1 << 22
"""Float32 numbers that the ranks add up: 16 MB."""
_GPU_VARIABLE = "NRL_DOCTOR_RANK_ON_GPU"
_ADVICE = (
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME must name interfaces that exist (ip -brief address); NCCL needs shared "
    "memory, and says with NCCL_DEBUG=INFO what it tries."
)


def check_exchange(request: NodeRequest, num_gpus: int) -> Finding:
    """Start as many ranks as the run will have here and let them add up a tensor.

    Args:
        request: what the run asks of this machine.
        num_gpus: GPUs of the machine.
    """
    on_gpu = bool(num_gpus) if request.uses_gpu is None else request.uses_gpu
    num_ranks = request.ranks or (num_gpus if on_gpu else 2)
    if num_ranks < 2:
        return skipped("the run has one rank on this machine")
    if on_gpu and num_ranks > num_gpus:
        return skipped(f"{num_ranks} ranks need as many GPUs, this machine shows {num_gpus}")
    with bind_free_port("127.0.0.1", None, None) as bound:
        port = bound.getsockname()[1]
    common = {"WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, _GPU_VARIABLE: int(on_gpu)}
    ranks = [_start(common | {"RANK": rank}) for rank in range(num_ranks)]
    try:
        errors = _await(ranks)
        answer = "" if errors else ranks[0].communicate()[0].strip()
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    name = f"{'NCCL' if on_gpu else 'gloo'} between {num_ranks} processes"
    if errors:
        return Finding(Status.FAILED, f"{name}: {errors[0]}", _ADVICE, details="\n".join(errors))
    return ok(f"{name}: {answer}")


def _start(variables: dict[str, object]) -> subprocess.Popen[str]:
    environment = os.environ | {name: str(value) for name, value in variables.items()} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "nemo_rl.doctor.exchange"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _await(ranks: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Wait until all ranks have ended or one has failed; the last lines of those that failed, or who is missing."""
    end = time.monotonic() + DEADLINE_S - _GRACE_S
    while time.monotonic() < end and not any(p.poll() for p in ranks) and any(p.poll() is None for p in ranks):
        time.sleep(0.05)
    failed = {rank: process for rank, process in enumerate(ranks) if process.poll()}
    if not failed:
        return [f"rank {rank} did not answer in time" for rank, process in enumerate(ranks) if process.poll() is None]
    said = {rank: process.communicate()[1].strip().splitlines() for rank, process in failed.items()}
    return [
        f"rank {rank}: {(lines or [f'ended with status {failed[rank].poll()}'])[-1]}" for rank, lines in said.items()
    ]


def main() -> None:
    """One rank: join, add up a tensor, and on rank 0 say how fast that was."""
    import torch
    import torch.distributed as dist

    from nemo_rl.distributed.process_group import destroy_process_group, init_process_group
    from nemo_rl.utils.device import device_for

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
        sys.stdout.write(f"{numbers.nbytes / 1e6:.0f} MB added up in {seconds * 1e3:.0f} ms\n")
    destroy_process_group()


if __name__ == "__main__":
    main()
