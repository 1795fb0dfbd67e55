"""Report the experts that vLLM's routers choose for each token (`policy.router_replay`).

On GPUs, vLLM returns the experts with a response (`enable_return_routed_experts`). Only vLLM's second model runner
supports this, and it needs Triton. vLLM's CPU worker has the first model runner. There, functions of this module record
the experts inside the worker. vLLM's own capturer reads the routers, and `_Record` stores what it has read:

    routers ─► vLLM's RoutedExpertsCapturer: the tokens of a step ─► _Record: each slot of the cache

A token's experts are stored at the place of its keys and values in the cache. Therefore a cached prompt has its
experts, and a reused place gets the experts of its new token. Invariant: the experts of a token are those of the pass
that wrote its keys and values. After a weight update that recomputes the cache, they are those of the new weights.
"""

from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.kv_cache_interface import FullAttentionSpec

from nemo_rl.data.routed_experts import Experts, experts_dtype, with_unreported
from nemo_rl.models.generation.stepped import Finished
from nemo_rl.utils.errors import ConfigError


def moe_layers(worker: Any) -> list[int]:
    """Return the numbers of this rank's layers with experts, in order."""
    model = worker.model_runner.get_model()
    return sorted({module.layer_id for module in model.modules() if isinstance(module, MoERunner)})


def start_record(worker: Any) -> None:
    """Record the experts of all tokens from now on.

    Raises:
        ConfigError: No layer has full attention, so the cache does not keep all tokens of a request.
    """
    worker.expert_record = _Record(worker)


def take_experts(worker: Any, wanted: list[tuple[str, int]]) -> list[Tensor] | None:
    """Return the experts of requests that are running or that ended in the last step.

    Args:
        wanted: Id of each request, and the number of its first tokens whose experts are returned.

    Returns:
        `[tokens, L, k]` for each request, where L counts this rank's layers. None if another rank of the stage answers.
    """
    record: _Record = worker.expert_record
    return record.of_requests(wanted) if get_tp_group().is_first_rank else None


class _Record:
    """The experts of the tokens in each slot of a rank's key-value cache."""

    def __init__(self, worker: Any) -> None:
        self._runner = worker.model_runner
        config = self._runner.vllm_config
        # # Every rank records, because ranks may have to exchange their tokens for this.
        self._capturer = RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
        bind_routed_experts_capturer(self._runner.get_model(), self._capturer)
        self._layers = moe_layers(worker)
        cache = self._runner.kv_cache_config
        specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
        whole = [number for number, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)]
        if not whole:
            raise ConfigError(
                "policy.router_replay.enabled=true needs a layer with full attention, whose cache keeps all tokens of "
                "a request; this model has none. Set policy.router_replay.enabled=false."
            )
        self._group = whole[0]
        self._block_size: int = specs[self._group].block_size
        num_experts = config.model_config.get_num_experts()
        dtype = getattr(torch, experts_dtype(num_experts).name)
        shape = (cache.num_blocks * self._block_size, len(self._layers), self._capturer.shape_per_token[1])
        self._slots = torch.zeros(shape, dtype=dtype)
        self._keep_each_step()

    def _keep_each_step(self) -> None:
        """Store the experts of a step's tokens after each forward pass."""
        execute = self._runner.execute_model

        @wraps(execute)
        def execute_and_keep(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            output = execute(scheduler_output, *args, **kwargs)
            self._keep(scheduler_output.total_num_scheduled_tokens)
            return output

        self._runner.execute_model = execute_and_keep

    def _keep(self, num_tokens: int) -> None:
        slots = self._runner.input_batch.block_table[self._group].slot_mapping.gpu[:num_tokens]
        read = self._capturer.device_buffer[:num_tokens, self._layers]
        self._slots[slots] = read.to(self._slots.dtype)

    def of_requests(self, wanted: list[tuple[str, int]]) -> list[Tensor]:
        """Return the experts of requests (`take_experts`)."""
        return [self._of_request(*each) for each in wanted]

    def _of_request(self, request_id: str, num_tokens: int) -> Tensor:
        blocks = torch.tensor(self._runner.requests[request_id].block_ids[self._group], dtype=torch.int64)
        positions = torch.arange(num_tokens)
        slots = blocks[positions // self._block_size] * self._block_size + positions % self._block_size
        return self._slots[slots]


class ExpertReports:
    """The experts of one engine's responses.

    Args:
        on_cpu: Whether the experts are recorded here, because vLLM does not return them.
    """

    def __init__(self, engine: LLMEngine, *, on_cpu: bool) -> None:
        self._on_cpu = on_cpu
        self._call_all: Any = engine.collective_rpc  # its type forbids arguments of a function
        self._num_experts: int = engine.model_config.get_num_experts()
        of_ranks = engine.collective_rpc(moe_layers)
        self._layers = sorted({layer for layers in of_ranks for layer in layers})
        if on_cpu:
            engine.collective_rpc(start_record)

    def of_outputs(self, outputs: Sequence[RequestOutput], ids: Mapping[str, str]) -> dict[str, Experts]:
        """Return the experts of finished requests by their ids.

        Args:
            outputs: Outputs of the last step.
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
        """Return the experts of a request that is about to end, or None if vLLM does not return them.

        Args:
            num_computed: Number of tokens whose keys and values are in the cache. 0 for a waiting request.
            num_tokens: Number of tokens of the prompt and the answer so far.
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
        """Return the experts that vLLM reports, `[n, L, k]`. Layers without experts are left out."""
        of_all_layers = output.outputs[0].routed_experts
        return None if of_all_layers is None else np.asarray(of_all_layers)[:, self._layers]


def with_experts(response: Finished, experts: Experts | None) -> Finished:
    """Return a response with the experts of its tokens."""
    return response if experts is None else response._replace(routed_experts=experts)
