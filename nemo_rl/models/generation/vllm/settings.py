"""What a process needs in its environment before vLLM is imported.

Invariant: nothing here imports vllm, so the controller can read it.
"""

LIBRARIES = (
    "torch._inductor.lowering",
    "openai.types.responses",
    "fastapi",
    "xgrammar",
    "compressed_tensors.quantization",
)
"""Half of what vLLM takes to import, for `optimizations.fork_server`; none of it is vLLM's own."""
CPU_SEQUENCES = 128
"""Sequences that an engine runs at once on the CPU, at the most."""


def engine_environment(device: str) -> dict[str, str]:
    """Environment variables for a vLLM actor on `device` ("cpu" or "cuda").

    The engine runs inside the actor's process: no second process to lose, and requests, weights and
    cache resets are plain calls between two steps. On CPUs there is one OpenMP thread until the engine
    takes more (`threads`), and a thread does not spin for long at a barrier, so that the trainer has all
    cores in its turn; rows of attention are not divided among threads; Dynamo would compile even in eager mode.
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
