"""Look at adapters inside an engine's process (`engine_process.EngineProcess.look`)."""

from typing import Any

from nemo_rl.models.adapters.tensors import AdapterTensors


def add(engine: Any, name: str, adapter: AdapterTensors) -> None:
    engine.add_adapter(name, adapter)


def drop(engine: Any, name: str) -> None:
    engine.drop_adapter(name)


def num_in_worker(engine: Any) -> int:
    """Return the number of adapters in the memory of vLLM's worker."""
    manager = engine._engine.model_executor.driver_worker.model_runner.get_model().lora_manager
    return len(manager.list_adapters())


def blocks_in_use(engine): ...
def row_of_products(engine): ...
def vllm_row(engine): ...
