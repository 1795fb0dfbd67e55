"""Define the environment that a process needs before it imports vLLM.

Invariant: this module does not import vllm, so the controller can import it.
"""

LIBRARIES = (
    "torch._inductor.lowering",
    "openai.types.responses",
    "fastapi",
    "xgrammar",
    "compressed_tensors.quantization",
    "torch.utils.cpp_extension",
    "aiohttp",
)
"""Modules for `optimizations.fork_server` that take half of vLLM's import time. None of them is part of vLLM."""
CPU_SEQUENCES = 128
"""Largest number of sequences that an engine runs concurrently on the CPU."""


def engine_environment(device: str) -> dict[str, str]:
    """Return the environment variables for a vLLM actor on `device` ("cpu" or "cuda").

    The engine runs in the actor's process, so requests, weight updates and cache resets are plain calls between two
    steps, and there is no second process that can die. On CPUs there is one OpenMP thread until the engine starts more
    (`threads`). Threads that wait at a barrier spin only briefly, so that the trainer has all cores when it works.
    Attention rows are not divided among threads. Dynamo is disabled, because it would compile even in eager mode.
    """
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    if device == "cpu":
        variables |= {
            "OMP_NUM_THREADS": "1",
            "GOMP_SPINCOUNT": "20000",
            "VLLM_CPU_ATTN_SPLIT_KV": "0",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    return variables


def kernel_variables(*, use_deep_gemm: bool, powers_of_two: bool) -> dict[str, str]:
    """Return the environment variables of vLLM that choose the kernels of float8 products.

    Args:
        use_deep_gemm: Whether to multiply with DeepGEMM.
        powers_of_two: Whether scales of activations are powers of two, which only DeepGEMM's kernels support.
    """
    return {
        "VLLM_USE_DEEP_GEMM": str(int(use_deep_gemm)),
        "VLLM_MOE_USE_DEEP_GEMM": str(int(use_deep_gemm)),
        "VLLM_USE_DEEP_GEMM_E8M0": str(int(powers_of_two)),
    }
