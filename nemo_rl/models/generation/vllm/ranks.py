"""Run a vLLM engine of several ranks under one scheduler, with a worker process and device per rank.

    worker 0: LLMEngine ─► RanksExecutor ─┬─ vLLM's worker, rank 0, called directly
                                          └─ link ─► worker k: VllmRank ─► vLLM's worker, rank k

vLLM itself would start the other ranks as its own processes, which Ray would neither place nor watch, and which could
not receive weights. Here every rank is a `GenerationWorker` with a bundle on this or another machine, which receives
and verifies weights. Its death is noticed like that of any worker. Ranks count tensor parallelism first: rank = stage x
tensor parallel size + position within the stage. Groups of ranks of one machine use vLLM's shared memory, all other
groups gloo or NCCL. Invariant: all ranks make the same calls in the same order.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import Lock
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.ranks import (
    Link,
    Meeting,
    RankAnswer,
    RankCall,
    ServedRank,
    call_all,
    ending_if_alone,
    enter_engine,
    meet,
    open_link,
    open_links,
)
from nemo_rl.models.generation.vllm.cpu_build import (
    compute_own_experts,
    exchange_tokens,
    repair_speculation,
    rotate_each_head,
    serve_experts_without_gate,
)
from nemo_rl.models.generation.vllm.drafting import keep_own_heads
from nemo_rl.models.generation.vllm.running_model import load_tensors, record_reads, take_reads
from nemo_rl.weight_sync.parts import BlocksByName

_SHARED_MEMORY = Path("/dev/shm")
_HOST_ADDRESS = "VLLM_HOST_IP"
"""Environment variable with the address on which vLLM's own sockets listen. It differs between machines."""
_OF_VLLM = ("VLLM_", "TORCHINDUCTOR_")
"""Prefixes of environment variables that vLLM sets during its configuration for processes that it would start."""


class _Start(NamedTuple):
    """Message from worker 0 to all other workers: vLLM's configuration, a name, and environment variables."""

    config: VllmConfig
    identity: str
    environment: dict[str, str]


def _build_worker(start: _Start, meeting: Meeting) -> WorkerWrapperBase:
    """Build vLLM's worker of a rank, with its device and model. All ranks call this at the same time."""
    parallel, name_on_machine = start.config.parallel_config, f"{start.identity}-{meeting.machine}"
    rank = meeting.place % parallel.world_size
    worker = WorkerWrapperBase(rpc_rank=0, global_rank=rank)
    arguments = {
        "vllm_config": start.config,
        "local_rank": meeting.local_place,
        "rank": rank,
        # The value only names segments of shared memory, because `enter_engine` has already formed the process group. A
        # group of ranks with different names does not use shared memory, so each machine has its own name.
        "distributed_init_method": f"file:///{name_on_machine}",
        "is_driver_worker": rank % parallel.tensor_parallel_size == 0,
        "shared_worker_lock": Lock(),
    }
    keep_own_heads()
    if current_platform.is_cpu():
        repair_speculation()
        rotate_each_head()
        serve_experts_without_gate()
    if current_platform.is_cpu() and parallel.enable_expert_parallel:
        compute_own_experts()
    if current_platform.is_cpu() and parallel.data_parallel_size > 1:
        exchange_tokens()
    worker.init_worker(all_kwargs=[arguments])
    worker.init_device()
    _forget_names(name_on_machine)
    worker.load_model()
    current_platform.update_block_size_for_backend(start.config)
    if current_platform.is_cpu() and not get_pp_group().is_first_rank:
        _make_stage_input(worker.model_runner)
    return worker


def _make_stage_input(runner: Any) -> None:
    """Allocate the buffer for a stage's input. vLLM does this in its warm-up, which it skips on CPUs."""
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def _forget_names(identity: str) -> None:
    """Unlink the shared memory that all ranks have mapped, so that the kernel frees it when they end."""
    for segment in _SHARED_MEMORY.glob(f"*{identity}*"):  # used for all-reduces on CPUs
        segment.unlink(missing_ok=True)
    queue = get_tp_group().mq_broadcaster
    if queue is not None and queue.buffer is not None and queue.buffer.is_creator:
        queue.buffer.shared_memory.unlink()
        queue.buffer.is_creator = False


def _links_of(head: int) -> str:
    """Return the name of the links between the first rank of a replica and the replica's other ranks."""
    return f"ranks of {head}"


def listening(meeting: Meeting) -> Meeting:
    """Make vLLM's own sockets listen on the address of this machine. Ray may have passed on the driver's address."""
    os.environ[_HOST_ADDRESS] = meeting.address
    return meeting


class RanksExecutor(UniProcExecutor):
    """vLLM's executor in worker 0 of an engine with several workers."""

    supports_pp = True

    def _init_executor(self) -> None:
        parallel = self.vllm_config.parallel_config
        self._output_rank = parallel.world_size - parallel.tensor_parallel_size
        head = parallel.data_parallel_rank * parallel.world_size
        meeting = listening(enter_engine(self.device_config.device_type, head, parallel.world_size_across_dp))
        self.num_passes = 0
        """Number of forward passes that `execute_model` has started so far."""
        others = range(head + 1, head + parallel.world_size)
        self._links: list[Link] = open_links(meeting, _links_of(head), others)
        environment = {name: value for name, value in os.environ.items() if name.startswith(_OF_VLLM)}
        environment.pop(_HOST_ADDRESS, None)
        start = _Start(self.vllm_config, f"nemo_rl-{uuid4().hex}", environment)
        for link in self._links:
            link.send(start)
        self.driver_worker = _build_worker(start, meeting)
        for link in self._links:
            link.receive()

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Run a forward pass like vLLM's executor, and count it."""
        self.num_passes += scheduler_output.total_num_scheduled_tokens > 0
        return super().execute_model(scheduler_output, non_block)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """Call a method of the worker of every rank, or a function with every worker as its first argument.

        Args:
            method: Method or function to call.
            timeout: Has no effect, as in vLLM's executor of one process.
            args: Positional arguments.
            kwargs: Keyword arguments.
            non_block: Whether to return a future.
            single_value: Whether to return only the result of the rank that samples, the first one of the last stage.
        """
        answering = [not single_value or rank == self._output_rank for rank, _ in enumerate(self._links, start=1)]
        answers = call_all(self._links, RankCall(method, args, kwargs or {}, wants_answer=True), answering)
        of_other: RankAnswer | None = answers[self._output_rank - 1] if single_value and self._output_rank else None
        with ending_if_alone(self._links):
            own = super().collective_rpc(
                method, args=args, kwargs=kwargs, non_block=non_block and of_other is None, single_value=True
            )
            if isinstance(own, Future) and own.done():
                own.result()  # raises the failure of a non-blocking call
        if single_value:
            chosen = own if of_other is None else of_other
            return chosen if non_block or of_other is None else of_other.result()
        return [own, *(answer.result() for answer in answers if answer is not None)]


class VllmRank(ServedRank):
    """Workers 1, 2 ... of a vLLM engine. They execute all calls of worker 0, including updates, sleep and recording."""

    def __init__(self, settings: EngineSettings):
        meeting = listening(meet(settings))
        head = meeting.place // settings.replica_size * settings.replica_size
        link = open_link(meeting, _links_of(head), head)
        start: _Start = link.receive()
        os.environ.update(start.environment)
        self._worker = _build_worker(start, meeting)
        self.serve(link, self._execute)

    def _execute(self, call: RankCall) -> Any:
        value = run_method(self._worker, call.method, call.args, call.kwargs)
        return value.get_output() if call.wants_answer and isinstance(value, AsyncModelRunnerOutput) else value

    async def load_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load this rank's part of each tensor (`Engine.load_tensors`)."""
        load_tensors(self._worker, tensors)

    def record_reads(self) -> None:
        """Record the reads of the next weight update (`RecordsReads.record_reads`)."""
        record_reads(self._worker)

    def take_reads(self) -> BlocksByName:
        """Return the parts of sent tensors that were read, and stop recording (`RecordsReads.take_reads`)."""
        return take_reads(self._worker)
