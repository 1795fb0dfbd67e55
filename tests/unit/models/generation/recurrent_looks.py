"""Inspect and disturb the recurrent layers of a vLLM engine, in its process (`engine_process.EngineProcess.look`)."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from nemo_rl.commands.conformance import Case, check_property


def _layers(engine: Any) -> dict[str, Any]:
    """Return the recurrent layers by name."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    model: nn.Module = engine._engine.model_executor.driver_worker.model_runner.get_model()
    return {name: module for name, module in model.named_modules() if isinstance(module, MambaBase)}


def recurrent_layers(engine: Any) -> list[str]:
    """Return the names of the recurrent layers."""
    return list(_layers(engine))


def _states(engine: Any) -> list[Tensor]:
    return [state for layer in _layers(engine).values() for state in layer.kv_cache]


def spoil_states(engine: Any) -> int:
    """Set all states to NaN, and return the number of tensors."""
    for state in _states(engine):
        state.fill_(torch.nan)
    return len(_states(engine))


def state_of(engine: Any) -> float:
    """Return the largest absolute value of all states, or infinity if one is not finite."""
    largest = max(float(state.float().abs().max()) for state in _states(engine))
    return largest if largest < torch.inf else torch.inf


def alter(engine: Any, layer: str, kind: str | None) -> None:
    """Change a value of a layer's weight at the end of all later updates. None ends this."""
    finish = type(engine).finish_loading

    def finish_wrongly(*, changed: bool) -> list[str]:
        unbound: list[str] = finish(engine, changed=changed)
        assert kind is not None
        module = _layers(engine)[layer]
        if kind == "conv1d.weight":
            held = getattr(module, "conv_weights", module.conv1d.weight)
        elif kind == "conv1d.bias":
            held = module.conv1d.bias
        else:
            held = module.A if kind == "A_log" and hasattr(module, "A") else getattr(module, kind)
        with torch.no_grad():
            held.view(-1)[1] += 0.25
        return unbound

    engine.finish_loading = finish_wrongly
    if kind is None:
        del engine.finish_loading


async def continue_with_old_states(engine: Any, case: Case) -> None:
    """Check an update of running requests in an engine that keeps their states."""
    keep = mock.patch("nemo_rl.models.generation.vllm.engine.clear_states", lambda worker: None)
    with mock.patch.object(engine._engine, "reset_prefix_cache"), keep:
        await check_property(engine, case, "update_in_flight")
