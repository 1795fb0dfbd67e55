"""Inspect a vLLM engine; the functions run in its process (`engine_process.EngineProcess.look`)."""

import itertools
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from nemo_rl.models.generation.interfaces import EngineSettings


def batch_limits(engine: Any) -> tuple[int, int]:
    """Return the largest numbers of sequences and tokens of one step."""
    scheduler = engine._engine.vllm_config.scheduler_config
    return scheduler.max_num_seqs, scheduler.max_num_batched_tokens


def batch_limits_on(engine: Any, gpu: str, memory_gib: int, settings: EngineSettings) -> tuple[int, int]:
    """Return the limits that vLLM would choose for these settings on a GPU of this name and size."""
    from vllm.engine import arg_utils

    platform = SimpleNamespace(
        get_device_total_memory=lambda: memory_gib << 30,
        get_device_name=lambda: gpu,
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    built = []

    def build(*arguments: Any, **keywords: Any) -> Any:
        built.append((arguments, keywords))
        scheduler = SimpleNamespace(max_num_active_reqs=1, _preempt_request=None)
        return SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler)))

    with (
        mock.patch("nemo_rl.models.generation.vllm.engine.LLMEngine.from_engine_args", build),
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
    """Return the addresses of all tensors that the model computes with."""
    (model,) = engine._engine.collective_rpc(lambda worker: worker.model_runner.get_model())
    return {name: tensor.data_ptr() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def named_shared_memory(engine: Any) -> list[str]:
    """Return shared memory of the process that would remain if it were killed now."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split("/dev/shm/")[1] for line in mapped if "/dev/shm/" in line and "(deleted)" not in line})


def rendezvous_file(engine: Any) -> str:
    """Return the target of the file by which the engine's process group was initialized."""
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return os.readlink(store.path)


class _Cycle:
    """A replacement for `ThreadChoice` with another number of threads for each step."""

    def __init__(self, counts: Sequence[int]):
        self._counts = itertools.cycle(counts)

    def begin_step(self, *, reads_prompts: bool) -> None:
        from nemo_rl.host.threads import set_threads

        set_threads(next(self._counts))

    def end_step(self, *, has_more: bool) -> None:
        pass


def compute_on(engine: Any, counts: Sequence[int]) -> None:
    """Set the numbers of threads of the next steps, used in turns."""
    engine._threads = _Cycle(counts)


def threads_under_load(
    engine: Any, num_cores: int, others: Sequence[float], decodes_on_one: bool = False, reads_prompts: bool = False
) -> list[int]:
    """Return the threads after some windows in which other processes use the given cores; steps take 10 ms."""
    import torch

    from nemo_rl.host.threads import set_threads
    from nemo_rl.optimizations import vllm

    before, found = torch.get_num_threads(), []
    clock, used = [0.0], [0.0]
    choice = vllm.ThreadChoice(num_cores, decodes_on_one=decodes_on_one)
    with mock.patch.multiple(
        vllm, time=SimpleNamespace(monotonic=lambda: clock[0]), busy_seconds_of_others=lambda: used[0]
    ):
        for busy in others:
            for step in range(30):
                choice.begin_step(reads_prompts=reads_prompts)
                clock[0], used[0] = clock[0] + 0.01, used[0] + 0.01 * busy
                choice.end_step(has_more=step < 29)
            clock[0], used[0] = clock[0] + 5, used[0] + 5 * num_cores  # the trainer's turn
            found.append(torch.get_num_threads())
    set_threads(before)
    return found


def threads_at_start(engine: Any, num_cores: int, adapts: bool = True) -> tuple[int, str]:
    """Return the threads that the engine's model starts with, and how they change."""
    import torch

    from nemo_rl.host.threads import set_threads
    from nemo_rl.optimizations import vllm

    runner = engine._engine.model_executor.driver_worker.model_runner
    before = torch.get_num_threads()
    set_threads(1)
    choice = vllm.start_threads(runner.get_model(), runner.model_config, num_cores, adapts=adapts)
    found = torch.get_num_threads()
    set_threads(before)
    if choice is None:
        return found, "as they are"
    return found, "two for prompts" if choice._decodes_on_one else "two for all"


def compute_ahead(engine: Any) -> None:
    """Let a step return while the next batch is computed, as on GPUs; vLLM does not do so on CPUs."""
    core = engine._engine.engine_core.engine_core
    core.batch_queue, core.batch_queue_size = deque(maxlen=2), 2
    core.step_fn = core.step_with_batch_queue


def bits_change(engine: Any, shape: tuple[int, int]) -> bool:
    """Return whether a product of this shape depends on the number of threads."""
    import torch

    from nemo_rl.optimizations.vllm import thread_count_changes_bits

    return thread_count_changes_bits([shape], torch.float32)


def products_differ(engine: Any, shape: tuple[int, int]) -> bool:
    """Compare products of this shape for several numbers of rows, computed by one thread and by two."""
    import torch
    from vllm import _custom_ops

    from nemo_rl.host.threads import set_threads
    from nemo_rl.optimizations.vllm import packing_threads

    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator)
    with packing_threads():
        handler = _custom_ops.create_onednn_mm(weight.t())
    products: dict[int, list[torch.Tensor]] = {1: [], 2: []}
    for count in (1, 2, 16, 128):
        rows = torch.randn(count, shape[1], generator=generator)
        for vllm, found in products.items():
            set_threads(vllm)
            found.append(_custom_ops.onednn_mm(handler, rows, None))
    set_threads(before)
    return any(not torch.equal(one, two) for one, two in zip(products[1], products[2], strict=True))


def bits_change_of_sums_by_threads(engine: Any) -> bool:
    """Return whether products are noticed whose last digits depend on the number of threads."""
    import torch
    from vllm import _custom_ops

    from nemo_rl.optimizations.vllm import thread_count_changes_bits

    product = _custom_ops.onednn_mm

    def divided(*arguments: Any) -> Any:
        result = product(*arguments)
        return result if torch.get_num_threads() == 1 else result.nextafter(torch.tensor(torch.inf))

    with mock.patch.object(_custom_ops, "onednn_mm", divided):
        return thread_count_changes_bits([(64, 64)], torch.float32)


def record_packing(engine: Any) -> None:
    """Record the number of threads of each packing of a weight from now on."""
    import torch
    from vllm import _custom_ops

    pack = _custom_ops.create_onednn_mm
    engine._packed_on = []

    def packed(*arguments: Any) -> Any:
        engine._packed_on.append(torch.get_num_threads())
        return pack(*arguments)

    engine._stop_recording = mock.patch.object(_custom_ops, "create_onednn_mm", packed)
    engine._stop_recording.start()


def take_packing(engine: Any) -> list[int]:
    """Return the numbers of threads since `record_packing`, and stop recording."""
    engine._stop_recording.stop()
    counts: list[int] = engine._packed_on
    return counts


def threads_of_sizes(engine: Any, tiny: int, small: int, num_cores: int, adapts: bool = True) -> tuple[int, str]:
    """Call `threads_at_start` with other bounds: below the first number of parameters tiny, below the second small."""
    from nemo_rl.optimizations import vllm

    with mock.patch.multiple(vllm, TINY_MODEL=tiny, SMALL_MODEL=small):
        return threads_at_start(engine, num_cores, adapts)


def busy_seconds(engine: Any, wait_s: float) -> float:
    """Return the processor seconds that other processes use while this one waits."""
    from nemo_rl.optimizations.vllm import busy_seconds_of_others

    before = busy_seconds_of_others()
    time.sleep(wait_s)
    return busy_seconds_of_others() - before


def follow_cache(engine: Any, follows: bool) -> None:
    """Let the number of running requests follow the cache, from its largest value, or keep it there."""
    from nemo_rl.models.generation.vllm.concurrency import ConcurrencyLimit

    limit = ConcurrencyLimit(engine._cache.limit.most)
    if not follows:
        limit.note_step = lambda **_: None
    engine._cache.limit = limit
    engine._cache.take_load()


def attention_backends(engine: Any) -> list[str]:
    """Return the names of the attention backends of the model and of the layers that propose tokens."""
    from nemo_rl.models.generation.vllm.drafting import models_of

    (models,) = engine._engine.collective_rpc(models_of)
    layers = [module for module in models.modules() if hasattr(module, "get_attn_backend")]
    assert len(layers) >= 2
    return sorted({layer.get_attn_backend().get_name() for layer in layers})


def loaded_extensions(engine: Any) -> list[str]:
    """Return the libraries of vLLM's own kernels that this process has loaded."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[-1] for line in mapped if "/vllm/_C" in line})


def router_biases(engine: Any) -> list[list[float]]:
    """Return the biases by which routers choose experts; they are in float32."""

    def found(worker: Any) -> list[list[float]]:
        import torch

        named = worker.model_runner.get_model().named_parameters()
        biases = [bias for name, bias in named if name.endswith("e_score_correction_bias")]
        assert {bias.dtype for bias in biases} == {torch.float32}
        return [bias.tolist() for bias in biases]

    (of_worker,) = engine._engine.collective_rpc(found)
    return of_worker
