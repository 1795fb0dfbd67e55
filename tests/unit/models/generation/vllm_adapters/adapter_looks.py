"""Look at adapters inside an engine's process (`engine_process.EngineProcess.look`)."""

import asyncio
from collections.abc import Callable
from typing import Any

import torch
from generation_helpers import load_weights
from torch import Tensor

from nemo_rl.models.adapters.tensors import AdapterTensors
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from nemo_rl.utils.errors import GenerationError


def add(engine: Any, name: str, adapter: AdapterTensors) -> None:
    engine.add_adapter(name, adapter)


def drop(engine: Any, name: str) -> None:
    engine.drop_adapter(name)


def refusal_of_add(engine: Any, name: str, adapter: AdapterTensors) -> str:
    """Return why an adapter is refused."""
    try:
        engine.add_adapter(name, adapter)
    except GenerationError as refusal:
        return str(refusal)
    return ""


def refusal_of(engine: Any, request: GenerationRequest) -> str:
    """Return why a request is refused."""
    return engine.try_request("refused", request) or ""


def held_in_worker(engine: Any) -> int:
    """Return the number of adapters in the memory of vLLM's worker."""
    return len(manager_of(engine).list_adapters())


def bytes_of_slots(engine: Any) -> int:
    """Return the size of the matrices of all slots in vLLM's worker."""
    stacked = [
        matrix
        for layer in manager_of(engine).modules.values()
        for side in (layer.lora_a_stacked, layer.lora_b_stacked)
        for matrix in (side if isinstance(side, tuple) else (side,))
    ]
    return sum(matrix.nbytes for matrix in stacked)


def answer_after_drop(engine: Any, request: GenerationRequest) -> tuple[list[int], list[int]]:
    """Drop the adapter of a request after its first steps.

    Returns:
        Its tokens, and the numbers of adapters in the worker before the drop, after it, and after the response.
    """
    assert request.adapter is not None
    engine.add_request("running", request)
    engine.step()
    counts = [held_in_worker(engine)]
    engine.drop_adapter(request.adapter)
    counts.append(held_in_worker(engine))
    finished = []
    while not finished:
        finished = engine.step()
    return finished[0].token_ids, [*counts, held_in_worker(engine)]


async def interrupted(
    engine: Any, request: GenerationRequest, adapters: dict[int, dict[str, Tensor]]
) -> GenerationResult:
    """Answer a request that begins with the first of two adapters, and goes on with the second after five tokens."""
    (first, old), (second, new) = adapters.items()
    await load_weights(engine, old.items(), first)
    answer = engine.generate("interrupted", request)
    while engine.num_tokens("interrupted") < 5:
        await asyncio.sleep(0)
    await load_weights(engine, new.items(), second)
    result: GenerationResult = await answer
    return result


def rows_of_wrappers(_: Any) -> dict[str, Tensor]:
    """Add adapters to four rows of zeros: two slots, both in use, for rows 0 and 3, and none for rows 1 and 2.

    Returns:
        The rows that each implementation of a linear layer and of the output head computes.
    """
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from nemo_rl.models.generation.vllm.adapters.products import AdapterProducts

    a, b = torch.ones(2, 1, 8, 4), torch.ones(2, 1, 6, 8) * torch.tensor([1.0, 10.0]).view(2, 1, 1, 1)
    found = {}
    kinds: dict[str, Callable[..., Any]] = {"vllm": PunicaWrapperCPU, "own": AdapterProducts}
    for name, kind in kinds.items():
        wrapper = kind(8, 8, "cpu")
        wrapper.update_metadata(LoRAMapping((5, 0, 0, 7), (5, 0, 0, 7), is_prefill=True), [5, 7], 3, 6)
        linear, head, x = torch.zeros(4, 6), torch.zeros(4, 6), torch.ones(4, 4)
        wrapper.add_lora_linear(linear, x, (a,), (b,), 1.0, (6,))
        wrapper.add_lora_logits(head, x, a, b, 1.0)
        found |= {f"{name} linear": linear, f"{name} head": head}
    return found


def manager_of(engine: Any) -> Any:
    """Return vLLM's manager of adapters."""
    return engine._engine.model_executor.driver_worker.model_runner.get_model().lora_manager
