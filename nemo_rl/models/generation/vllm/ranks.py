"""Run a vLLM engine of several ranks, each in its own worker process with its device, under one scheduler.

    worker 0: LLMEngine ─► RanksExecutor ─┬─ vLLM's worker, rank 0, called directly
                                          └─ link ─► worker k: VllmRank ─► vLLM's worker, rank k

vLLM would start the other ranks as its own processes, which Ray neither places nor watches, and which no weight
transport reaches. Here every rank is a `GenerationWorker`: it gets a bundle, receives and verifies weights, and its
death is noticed like that of any worker. Ranks count tensor parallelism first: rank = stage x tensor parallel size +
position within the stage. Invariant: all ranks make the same calls in the same order.
"""

import asyncio
import logging
import os
import traceback
from collections.abc import Callable, Collection
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

from nemo_rl.models.generation.interfaces import EngineSettings, GenerationRequest, GenerationResult, engine_of
from nemo_rl.models.generation.vllm.links import Answer, Call, Link, Outcome, enter_engine, open_link, open_links
from nemo_rl.models.generation.vllm.own_experts import compute_own_experts
from nemo_rl.models.generation.vllm.weights import load_tensors, record_reads, take_reads
from nemo_rl.weight_sync.parts import Parts

logger = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
_PATIENCE_S = 2.0
"""Seconds until the death of a rank is noticed after it has interrupted another rank's call."""
_OF_VLLM = ("VLLM_", "TORCHINDUCTOR_")
"""Prefixes of variables that vLLM sets while it builds its configuration, for the processes it would start."""


class _Start(NamedTuple):
    """Message of worker 0 to the others: vLLM's configuration, a name for the engine, and environment variables."""

    config: VllmConfig
    identity: str
    environment: dict[str, str]


def _build_worker(start: _Start, rank: int) -> WorkerWrapperBase:
    """Build vLLM's worker of a rank, with its device and model; all ranks do this at the same time."""
    worker = WorkerWrapperBase(rpc_rank=0, global_rank=rank)
    arguments = {
        "vllm_config": start.config,
        "local_rank": rank,
        "rank": rank,
        # It only names segments of shared memory; `links.enter_engine` has formed the process group already.
        "distributed_init_method": f"file:///{start.identity}",
        "is_driver_worker": rank % start.config.parallel_config.tensor_parallel_size == 0,
        "shared_worker_lock": Lock(),
    }
    if current_platform.is_cpu() and start.config.parallel_config.enable_expert_parallel:
        compute_own_experts()
    worker.init_worker(all_kwargs=[arguments])
    worker.init_device()
    _forget_names(start.identity)
    worker.load_model()
    current_platform.update_block_size_for_backend(start.config)
    if current_platform.is_cpu() and not get_pp_group().is_first_rank:
        _make_stage_input(worker.model_runner)
    return worker


def _make_stage_input(runner: Any) -> None:
    """Allocate a stage's buffer for its input; vLLM allocates it in its warm-up, which it skips on CPUs."""
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def _forget_names(identity: str) -> None:
    """Unlink the shared memory that all ranks have mapped, so that the kernel frees it when the ranks end."""
    for segment in _SHARED_MEMORY.glob(f"*{identity}*"):  # used for all-reduces on CPUs
        segment.unlink(missing_ok=True)
    queue = get_tp_group().mq_broadcaster
    if queue is not None and queue.buffer.is_creator:
        queue.buffer.shared_memory.unlink()
        queue.buffer.is_creator = False


class RanksExecutor(UniProcExecutor):
    """vLLM's executor in worker 0 of an engine of several workers."""

    supports_pp = True

    def _init_executor(self) -> None:
        parallel = self.vllm_config.parallel_config
        self._output_rank = parallel.world_size - parallel.tensor_parallel_size
        store = enter_engine(self.device_config.device_type, 0, parallel.world_size)
        self._links: list[Link] = open_links(store, parallel.world_size)
        environment = {name: value for name, value in os.environ.items() if name.startswith(_OF_VLLM)}
        start = _Start(self.vllm_config, f"nemo_rl-{uuid4().hex}", environment)
        for link in self._links:
            link.send(start)
        self.driver_worker = _build_worker(start, 0)
        for link in self._links:
            link.receive()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """Call a method of every rank's worker, or a function with every worker.

        Args:
            method: method or function to call.
            timeout: has no effect, as in vLLM's executor of one process.
            args: positional arguments.
            kwargs: keyword arguments.
            non_block: return a future.
            single_value: return only the answer of the rank that samples, the first one of the last stage.
        """
        answers = [
            link.call(Call(method, args, kwargs or {}, not single_value or rank == self._output_rank))
            for rank, link in enumerate(self._links, start=1)
        ]
        of_other: Answer | None = answers[self._output_rank - 1] if single_value and self._output_rank else None
        try:
            own = super().collective_rpc(
                method, args=args, kwargs=kwargs, non_block=non_block and of_other is None, single_value=True
            )
        except Exception:
            for link in self._links:
                link.end_if_alone(_PATIENCE_S)
            raise
        if single_value:
            chosen = own if of_other is None else of_other
            return chosen if non_block or of_other is None else of_other.result()
        return [own, *(answer.result() for answer in answers if answer is not None)]


class VllmRank:
    """Workers 1, 2 ... of a vLLM engine: an `Engine` that receives weights and executes the calls of worker 0.

    Calls run between two callbacks of the event loop, like the engine's steps in worker 0. Weight updates, sleep and
    recording of layers are such calls, so their methods here do nothing.
    """

    def __init__(self, settings: EngineSettings):
        _, rank = engine_of(int(os.environ["RANK"]), settings.num_workers)
        self._link = open_link(enter_engine(settings.device, rank, settings.num_workers), rank)
        start: _Start = self._link.receive()
        os.environ.update(start.environment)
        self._worker = _build_worker(start, rank)
        self._link.send(Outcome(None))
        self._link.when_it_brings(asyncio.get_running_loop(), self._do_next)

    def _do_next(self) -> None:
        call: Call = self._link.receive()
        try:
            value = run_method(self._worker, call.method, call.args, call.kwargs)
            if call.wants_answer and isinstance(value, AsyncModelRunnerOutput):
                value = value.get_output()
            outcome = Outcome(value)
        except Exception:  # boundary: worker 0 gets the error, or sees that this rank is gone
            outcome = Outcome(None, traceback.format_exc())
        if call.wants_answer or outcome.failure is not None:
            self._link.send(outcome)
        if not call.wants_answer and outcome.failure is not None:
            # Worker 0 has usually failed too and reports why. If it waits for this rank instead, only an exit releases
            # it.
            logger.error("A step failed, so this process ends.\n%s", outcome.failure)
            asyncio.get_running_loop().call_later(2 * _PATIENCE_S, os._exit, 1)

    async def generate(self, request_id: str, request: GenerationRequest) -> GenerationResult:
        """See `Engine.generate`; requests go to worker 0."""
        raise NotImplementedError("Requests go to worker 0 of an engine.")

    async def abort(self, request_ids: Collection[str]) -> None:
        """See `Engine.abort`."""

    async def begin_weight_update(self) -> None:
        """See `Engine.begin_weight_update`."""

    async def load_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """See `Engine.load_tensors`; loads this rank's part of each tensor."""
        load_tensors(self._worker, tensors)

    def record_reads(self) -> None:
        """See `RecordsReads.record_reads`."""
        record_reads(self._worker)

    def take_reads(self) -> Parts:
        """See `RecordsReads.take_reads`."""
        return take_reads(self._worker)

    async def finish_weight_update(self, version: int) -> list[str]:
        """See `Engine.finish_weight_update`; worker 0 reports missing tensors of all ranks."""
        return []

    async def layer_outputs(self, token_ids: list[int]) -> list[torch.Tensor]:
        """See `Engine.layer_outputs`."""
        return []

    async def sleep(self) -> None:
        """See `Engine.sleep`."""

    async def wake_up(self) -> None:
        """See `Engine.wake_up`."""
