"""What tests want to know of a vLLM engine; functions that run in its process (`engine_process.EngineProcess.look`)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from nemo_rl.models.generation.interfaces import EngineSettings


def batch_limits(engine: Any) -> tuple[int, int]:
    """Most sequences and most tokens of one step."""
    scheduler = engine._engine.vllm_config.scheduler_config
    return scheduler.max_num_seqs, scheduler.max_num_batched_tokens


def batch_limits_on(engine: Any, gpu: str, memory_gib: int, settings: EngineSettings) -> tuple[int, int]:
    """The same of an engine of these settings on a GPU of this name and size, as vLLM would choose them."""
    from vllm.engine import arg_utils

    platform = SimpleNamespace(
        get_device_total_memory=lambda: memory_gib << 30,
        get_device_name=lambda: gpu,
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    built = []
    with (
        mock.patch(
            "nemo_rl.models.generation.vllm.engine.LLMEngine.from_engine_args", lambda *a, **k: built.append((a, k))
        ),
        mock.patch.object(arg_utils, "current_platform", platform),
    ):
        type(engine)(settings)
        (((arguments,), keywords),) = built
        arguments.enable_chunked_prefill = True
        model = SimpleNamespace(max_model_len=settings.max_model_len, is_multimodal_model=False)
        parallel = SimpleNamespace(use_batched_dp_moe=False)
        arguments._set_default_max_num_seqs_and_batched_tokens_args(keywords.get("usage_context"), model, parallel)
    return arguments.max_num_seqs, arguments.max_num_batched_tokens


def storages(engine: Any) -> dict[str, int]:
    """Addresses of all tensors that the model computes with."""
    (model,) = engine._engine.collective_rpc(lambda worker: worker.model_runner.get_model())
    return {name: tensor.data_ptr() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def named_shared_memory(engine: Any) -> list[str]:
    """Shared memory of the process that would be left behind if it were killed now."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split("/dev/shm/")[1] for line in mapped if "/dev/shm/" in line and "(deleted)" not in line})
