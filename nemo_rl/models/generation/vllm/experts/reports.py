"""Give responses the experts of their tokens; `record` has them on CPUs, on GPUs vLLM returns them with a response."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine

from nemo_rl.data.routed_experts import Experts, with_unreported
from nemo_rl.models.generation.stepped import Finished
from nemo_rl.models.generation.vllm.experts.record import moe_layers, start_record, take_experts


class ExpertReports:
    """The experts of one engine's responses.

    Args:
        engine: vLLM's engine.
        on_cpu: whether they are recorded here, because vLLM does not return them.
    """

    def __init__(self, engine: LLMEngine, *, on_cpu: bool) -> None:
        self._on_cpu = on_cpu
        self._call_all: Any = engine.collective_rpc  # its type allows no arguments for a function
        self._num_experts: int = engine.model_config.get_num_experts()
        of_ranks = engine.collective_rpc(moe_layers)
        self._layers = sorted({layer for layers in of_ranks for layer in layers})
        if on_cpu:
            engine.collective_rpc(start_record)

    def of_outputs(self, outputs: Sequence[RequestOutput], ids: Mapping[str, str]) -> dict[str, Experts]:
        """Return the experts of finished requests by their ids.

        Args:
            outputs: of the last step.
            ids: vLLM's id of each request.
        """
        if not outputs:
            return {}
        lengths = [len(output.prompt_token_ids or ()) + len(output.outputs[0].token_ids) for output in outputs]
        if self._on_cpu:
            wanted = [(ids[output.request_id], n - 1) for output, n in zip(outputs, lengths, strict=True)]
            reported: Sequence[NDArray[Any] | None] = self._recorded(wanted)
        else:
            reported = [self._returned(output) for output in outputs]
        return {
            output.request_id: with_unreported(rows, length, self._num_experts)
            for output, length, rows in zip(outputs, lengths, reported, strict=True)
            if rows is not None
        }

    def of_running(self, vllm_id: str, num_computed: int, num_tokens: int) -> Experts | None:
        """Return the experts of a request that is about to be ended; None where vLLM does not return them.

        Args:
            vllm_id: vLLM's id of the request.
            num_computed: tokens whose keys and values are in the cache; 0 for a request that waits.
            num_tokens: tokens of the prompt and the answer so far.
        """
        if not self._on_cpu or num_computed == 0:
            return None
        (rows,) = self._recorded([(vllm_id, min(num_computed, num_tokens))])
        return with_unreported(rows, num_tokens, self._num_experts)

    def _recorded(self, wanted: list[tuple[str, int]]) -> list[NDArray[Any]]:
        of_ranks = self._call_all(take_experts, args=(wanted,))
        stages = [of_rank for of_rank in of_ranks if of_rank is not None]
        return [torch.cat(of_request, dim=1).numpy() for of_request in zip(*stages, strict=True)]

    def _returned(self, output: RequestOutput) -> NDArray[Any] | None:
        """Return what vLLM reports, `[n, L, k]`, without the layers that have no experts."""
        of_all_layers = output.outputs[0].routed_experts
        return None if of_all_layers is None else np.asarray(of_all_layers)[:, self._layers]


def with_experts(response: Finished, experts: Experts | None) -> Finished:
    """Return a response with the experts of its tokens."""
    return response if experts is None else response._replace(routed_experts=experts)
