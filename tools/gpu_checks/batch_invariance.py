"""Check that an answer of an engine has the same bits alone, with others and in another order.

On GPUs this is vLLM with its switch `VLLM_BATCH_INVARIANT`. On CPUs it is the engine `hf` with `zero_mismatch`.
"""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

from tiny_models import make_char_tokenizer

from gpu_checks.bench import Bench
from gpu_checks.report import Finding
from nemo_rl.commands.conformance.case import Case
from nemo_rl.commands.conformance.run import check_engine
from nemo_rl.models.generation.interfaces import EngineSettings

_PROPERTY = "batch_invariance"
SWITCH = {"VLLM_BATCH_INVARIANT": "1"}


def engine(bench: Bench) -> Iterator[Finding]:
    """Compare answers in bfloat16. Without vLLM on a GPU, the row says so."""
    backend = "vllm" if bench.on_gpu else "hf"
    if bench.on_gpu and find_spec(backend) is None:
        yield Finding(backend, {"reason": "vLLM is not installed"})
    else:
        yield Finding(f"{backend}, bfloat16", {}, problem(bench, settings(bench, backend)))


def settings(bench: Bench, backend: str) -> EngineSettings:
    """Return the settings of an engine that declares the property."""
    folder = bench.folder("qwen2")
    make_char_tokenizer().save_pretrained(folder)
    common = EngineSettings(
        backend, folder, folder, bench.device.type, "bfloat16", max_model_len=256, kv_cache_bytes=64 << 20
    )
    return replace(common, load_weights=True, zero_mismatch=not bench.on_gpu, env_vars=SWITCH if bench.on_gpu else {})


def problem(bench: Bench, engine_settings: EngineSettings) -> str:
    """Return what is wrong with an engine, or an empty text."""
    bench.end_policy()
    report = check_engine(engine_settings, Case(engine_settings.model_name), (_PROPERTY,))
    return (report.failures | report.not_promised).get(_PROPERTY, "")
