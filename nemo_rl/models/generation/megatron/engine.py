"""Run Megatron Core's GPTModel as an `Engine`, on one rank or on several.

    worker 0: MegatronEngine ─► rows and draws ─┬─ own ModelPart, called directly
                                                └─ link ─► worker k: MegatronRank ─► its ModelPart

Every rank receives and verifies its own weights. Ranks count tensor parallelism first: rank = stage x tensor parallel
size + position within the stage.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, override

from torch import Tensor

from nemo_rl.models.generation.decoding.continuous import ContinuousEngine
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.megatron.part import ModelPart
from nemo_rl.models.generation.ranks.links import Call, Link, call_all, open_link, open_links
from nemo_rl.models.generation.ranks.meeting import meet
from nemo_rl.models.generation.ranks.served import ServedRank, ending_if_alone
from nemo_rl.weight_sync.parts import Parts

_LINKS = "ranks"


class _HoldsPart:
    """The methods of `Engine` that every worker does for its own part of the model."""

    _part: ModelPart

    async def load_tensors(self, tensors: list[tuple[str, Tensor]]) -> None:
        """See `Engine.load_tensors`; loads this rank's part of each tensor."""
        self._part.load_tensors(tensors)

    def record_reads(self) -> None:
        """See `RecordsReads.record_reads`."""
        self._part.record_reads()

    def take_reads(self) -> Parts:
        """See `RecordsReads.take_reads`."""
        return self._part.take_reads()

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        self._part.sleep()

    async def wake_up(self) -> None:
        """See `Engine.wake_up`."""
        self._part.wake_up()


class MegatronEngine(_HoldsPart, ContinuousEngine):
    """The engine; `engine_kwargs["megatron_cfg"]` has the settings with which the policy computes the model."""

    def __init__(self, settings: EngineSettings) -> None:
        self._links: list[Link] = []
        if settings.num_workers == 1:
            self._part = ModelPart(settings)
        else:
            meeting = meet(settings)
            self._links = open_links(meeting, _LINKS, range(1, settings.num_workers))
            self._part = ModelPart(settings, meeting)
            for link in self._links:
                link.receive()
        self._model = self._part.model
        self._leads_stage = [rank % settings.tensor_parallel_size == 0 for rank in range(1, settings.num_workers)]
        super().__init__(settings, self._part.vocab_size, self._part.cache)

    @override
    def read(self, rows: Mapping[str, Sequence[int]]) -> Tensor:
        logits_bV: Tensor = self._on_all("read", rows)[0]
        return logits_bV

    @override
    def enter(self, row: str, token_ids: Sequence[int]) -> None:
        self._on_all("cache.enter", row, token_ids)

    @override
    def leave(self, rows: Sequence[str]) -> None:
        self._on_all("cache.leave", rows)

    @override
    def clear(self) -> None:
        self._on_all("cache.clear")

    def _on_all(self, method: str, *args: Any, answering: Sequence[bool] = ()) -> list[Any]:
        """Call a method of each part, or "cache.x"; return the own answer and those of the ranks in `answering`."""
        wanted = answering or [False] * len(self._links)
        answers = call_all(self._links, Call(method, args, {}, wants_answer=False), wanted)
        with ending_if_alone(self._links):
            own = attrgetter(method)(self._part)(*args)
        return [own, *(answer.result() for answer in answers if answer is not None)]

    @override
    def start_loading(self) -> None:
        self._part.start_loading()

    def put_in_force(self) -> list[str]:
        """See `RowsEngine.put_in_force`; returns hub names of the tensors that this rank was not sent."""
        return self._part.not_loaded()

    @override
    async def layer_outputs(self, token_ids: list[int]) -> list[Tensor]:
        return list(chain.from_iterable(self._on_all("layer_outputs", token_ids, answering=self._leads_stage)))


class MegatronRank(_HoldsPart, ServedRank):
    """Workers 1, 2 ... of an engine: they compute what worker 0 asks for, and handle weights themselves."""

    def __init__(self, settings: EngineSettings) -> None:
        meeting = meet(settings)
        link = open_link(meeting, _LINKS, 0)
        self._part = ModelPart(settings, meeting)
        self.serve(link, self._execute)

    def _execute(self, call: Call) -> Any:
        value = attrgetter(str(call.method))(self._part)(*call.args)
        return value if call.wants_answer else None

    @override
    async def begin_weight_update(self) -> None:
        self._part.start_loading()

    async def finish_weight_update(self, version: int) -> list[str]:
        """See `Engine.finish_weight_update`; returns hub names of the tensors that this rank was not sent."""
        return self._part.not_loaded()

    def weights_not_finite(self) -> list[str]:
        """Return the names of this rank's weights that hold NaN or infinity."""
        return self._part.weights_not_finite()
