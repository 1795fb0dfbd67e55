"""Run a vLLM engine of several synchronous replicas, because more ranks divide its experts than its other layers.

    place 0: VllmReplicas ─┬─ own VllmEngine (replica 0) ─► RanksExecutor ─► its ranks
                           └─ link ─► VllmReplica ─► VllmEngine (replica k) ─► RanksExecutor ─► its ranks

Each replica (vLLM's data parallelism) has all layers but the experts, its own requests, scheduler and key-value cache.
The experts of a layer are divided over the ranks of all replicas, so every forward pass of a replica needs all
replicas. vLLM's own coordinator of replicas belongs to its multi-process server. Here place 0 distributes the requests
and lets all replicas take a step together. Invariant: a step of the engine is one forward pass of every replica. A
replica without tokens to compute runs an empty pass.
"""

import os
from collections.abc import Collection
from typing import Any, override

import torch

from nemo_rl.distributed.ranks.rendezvous import hold_port
from nemo_rl.models.generation.engine_load import EngineLoad
from nemo_rl.models.generation.interfaces import EngineSettings, GenerationRequest
from nemo_rl.models.generation.ranks import (
    Link,
    Meeting,
    RankAnswer,
    RankCall,
    ServedRank,
    ending_if_alone,
    meet,
    open_link,
    open_links,
)
from nemo_rl.models.generation.stepped import Finished, SteppedEngine
from nemo_rl.models.generation.vllm.engine import VllmEngine
from nemo_rl.models.generation.vllm.ranks import listening
from nemo_rl.utils.errors import GenerationError
from nemo_rl.weight_sync.parts import BlocksByName

_LINKS = "replicas"
_PORT = "port of replicas"


class VllmReplicas(SteppedEngine):
    """Place 0 of an engine of several replicas."""

    accepts_grammars = True

    def __init__(self, settings: EngineSettings):
        super().__init__()
        meeting = listening(meet(settings))
        _, port = hold_port(meeting.address, None, None)
        meeting.store.set(_PORT, str(port))
        _join(meeting, settings)
        heads = range(settings.replica_size, settings.num_workers, settings.replica_size)
        self._links: list[Link] = open_links(meeting, _LINKS, heads)
        self._own = VllmEngine(settings)
        for link in self._links:
            link.receive()
        self._replica_of: dict[str, int] = {}
        self._num_open = [0] * settings.num_replicas

    def add_request(self, request_id: str, request: GenerationRequest) -> None:
        """Queue a request at the replica with the fewest requests (`SteppedEngine.add_request`)."""
        replica = self._num_open.index(min(self._num_open))
        refusal: str | None = self._ask(replica, "try_request", request_id, request)
        if refusal is not None:
            raise GenerationError(refusal)
        self._replica_of[request_id] = replica
        self._num_open[replica] += 1

    @override
    def step(self) -> list[Finished]:
        finished = [response for of_replica in self._on_all("step_with_others") for response in of_replica]
        for response in finished:
            if response.request_id in self._replica_of:  # skips the prompt of `layer_outputs`
                self._take_back(response.request_id)
        return finished

    @override
    def remove_requests(self, request_ids: Collection[str]) -> list[Finished]:
        removed: list[Finished] = []
        for request_id in request_ids:
            removed += self._ask(self._take_back(request_id), "remove_requests", [request_id])
        return removed

    def _take_back(self, request_id: str) -> int:
        """Remove a request that its replica no longer has. Return the number of the replica."""
        replica = self._replica_of.pop(request_id)
        self._num_open[replica] -= 1
        return replica

    @override
    def sampled_so_far(self, request_id: str) -> tuple[list[int], list[float]]:
        sampled: tuple[list[int], list[float]] = self._ask(self._replica_of[request_id], "sampled_so_far", request_id)
        return sampled

    @override
    def num_tokens(self, request_id: str) -> int:
        number: int = self._ask(self._replica_of[request_id], "num_tokens", request_id)
        return number

    @override
    def weights_not_finite(self) -> list[str]:
        return list(dict.fromkeys(name for names in self._on_all("weights_not_finite") for name in names))

    def take_load(self) -> EngineLoad:
        """Return the load: sums of the replicas' counts, and the usage of the fullest cache."""
        loads: list[EngineLoad] = self._on_all("take_load")
        return EngineLoad(
            sum(load.num_preemptions for load in loads),
            max(load.kv_cache_usage for load in loads),
            sum(load.max_running for load in loads),
        )

    @override
    def decode(self, token_ids: list[int]) -> str | None:
        return self._own.decode(token_ids)

    @override
    def start_loading(self) -> None:
        self._on_all("start_loading")

    async def load_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load some of the new tensors. All other ranks load the tensors that they receive."""
        await self._own.load_tensors(tensors)

    def record_reads(self) -> None:
        """Record the reads of the next weight update (`RecordsReads.record_reads`)."""
        self._own.record_reads()

    def take_reads(self) -> BlocksByName:
        """Return the parts of sent tensors that were read, and stop recording (`RecordsReads.take_reads`)."""
        return self._own.take_reads()

    @override
    def finish_loading(self, *, changed: bool) -> list[str]:
        return [name for names in self._on_all("finish_loading", changed=changed) for name in names]

    async def layer_outputs(self, token_ids: list[int]) -> list[torch.Tensor]:
        """Compute hidden states on replica 0, while all other replicas run empty passes."""
        return self._own.recorded_layers(token_ids, self.step)

    @override
    async def sleep(self) -> None:
        self._on_all("fall_asleep")

    @override
    async def wake_up(self) -> None:
        self._on_all("awake")

    def _ask(self, replica: int, method: str, *args: Any) -> Any:
        """Call a method of a replica's engine."""
        if replica == 0:
            return getattr(self._own, method)(*args)
        answer = self._links[replica - 1].call(RankCall(method, args, {}, True))
        assert answer is not None, "an answer is wanted"
        return answer.result()

    def _on_all(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method of all replicas' engines at the same time."""
        calls = [link.call(RankCall(method, (), kwargs, True)) for link in self._links]
        answers: list[RankAnswer] = [answer for answer in calls if answer is not None]
        with ending_if_alone(self._links):
            own = getattr(self._own, method)(**kwargs)
        return [own, *(answer.result() for answer in answers)]


class VllmReplica(ServedRank):
    """First rank of a replica after the first. It is an engine that executes the calls of place 0."""

    def __init__(self, settings: EngineSettings):
        meeting = listening(meet(settings))
        _join(meeting, settings)
        link = open_link(meeting, _LINKS, 0)
        self._engine = VllmEngine(settings)
        self.serve(link, self._execute)

    def _execute(self, call: RankCall) -> Any:
        return getattr(self._engine, str(call.method))(*call.args, **call.kwargs)

    async def load_tensors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load this rank's part of each tensor (`Engine.load_tensors`)."""
        await self._engine.load_tensors(tensors)

    def record_reads(self) -> None:
        """Record the reads of the next weight update (`RecordsReads.record_reads`)."""
        self._engine.record_reads()

    def take_reads(self) -> BlocksByName:
        """Return the parts of sent tensors that were read, and stop recording (`RecordsReads.take_reads`)."""
        return self._engine.take_reads()


def _join(meeting: Meeting, settings: EngineSettings) -> None:
    """Set the environment variables that tell vLLM that this process leads one of several replicas.

    The index of a rank's GPU is its place on its machine, so vLLM must not add an offset (VLLM_DP_RANK_LOCAL).
    """
    os.environ.update(
        VLLM_DP_SIZE=str(settings.num_replicas),
        VLLM_DP_RANK=str(meeting.place // settings.replica_size),
        VLLM_DP_RANK_LOCAL="0",
        VLLM_DP_MASTER_IP=os.environ["MASTER_ADDR"],
        VLLM_DP_MASTER_PORT=meeting.store.get(_PORT).decode(),
    )
