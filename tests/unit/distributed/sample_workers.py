"""Worker classes for the tests of worker groups; imported by name inside worker processes."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time

from nemo_rl.files import trusted_code

logger = logging.getLogger("nemo_rl.sample")


class Plain:
    """Answers questions, misbehaves on demand. Needs no torch."""

    def __init__(self, greeting: str = "hello", fail_on_rank: int | None = None) -> None:
        self.greeting = greeting
        self.rank = int(os.environ["RANK"])
        if fail_on_rank == self.rank:
            raise ValueError(f"rank {self.rank} cannot be built")

    def environment(self, *names: str) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    def loaded(self, module: str) -> bool:
        return module in sys.modules

    def trusted(self) -> set[str]:
        return set(trusted_code.trusted_code())

    def late_rank(self, base: int = 0) -> int:
        time.sleep(0.2 * (2 - self.rank))
        return base + self.rank

    def echo(self, data, factor: int = 1):
        return self.rank, data, factor

    def pid(self) -> int:
        return os.getpid()

    def raise_on(self, rank: int) -> None:
        if self.rank == rank:
            raise ValueError(f"bad value on rank {rank}")
        self.stuck_in_c()

    def die_on(self, rank: int) -> None:
        if self.rank == rank:
            logger.info("last words of rank %d", rank)
            os.kill(os.getpid(), signal.SIGKILL)
        self.stuck_in_c()

    def break_when_peer_dies(self, rank: int) -> None:
        if self.rank == rank:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("connection closed by peer")

    def break_once_there(self, path: str) -> None:
        if self.rank == 0:
            while not os.path.exists(path):
                time.sleep(0.05)
            raise RuntimeError("connection closed by peer")
        self.stuck_in_c()

    def hang_on(self, rank: int) -> None:
        if self.rank == rank:
            self.stuck_in_c()

    def stuck_in_c(self) -> None:
        while True:
            time.sleep(3600)

    def spawn_child(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    def cleanup(self, marker: str | None = None) -> None:
        logger.info("cleaned up")

    def cleanup_forever(self) -> None:
        self.stuck_in_c()


class Slow(Plain):
    """A class whose constructor takes long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        began = time.time()
        time.sleep(seconds)
        self._built_in = (began, time.time())

    def built_in(self) -> tuple[float, float]:
        return self._built_in


class SlowLast(Plain):
    """A class whose constructor takes long on rank 1, in a phase of its own."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        from nemo_rl.distributed.workers.start_phases import start_phase

        with start_phase("waiting"):
            time.sleep(seconds * self.rank)


class Meeting:
    """Two coroutines that need each other: works only when calls run concurrently."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()

    async def wait_for_other(self) -> str:
        await self.arrived.wait()
        return "met"

    async def arrive(self) -> None:
        self.arrived.set()


class Tensors:
    """Handles batches; imports torch."""

    def __init__(self) -> None:
        import torch

        self.torch = torch

    def total(self, data) -> float:
        return float(data["x"].double().sum())

    def give_back(self, data):
        return data

    def all_reduce(self) -> float:
        from nemo_rl.distributed.ranks.process_group import destroy_process_group, init_process_group
        from nemo_rl.host.device import Device

        init_process_group(Device("cpu"), timeout_s=60)
        value = self.torch.tensor(float(os.environ["RANK"]) + 1)
        self.torch.distributed.all_reduce(value)
        destroy_process_group()
        return value.item()
