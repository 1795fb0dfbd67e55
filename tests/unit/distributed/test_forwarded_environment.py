"""Variables of the driver that reach workers of a cluster that it joins."""

import ray

from nemo_rl.distributed import virtual_cluster
from nemo_rl.distributed.cluster import joined_ray
from nemo_rl.distributed.virtual_cluster import forwarded_environment, init_ray

FORWARDED = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "NVTE_FLASH_ATTN",
    "FI_PROVIDER",
    "UCX_NET_DEVICES",
    "TRITON_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_DEBUG",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRANSFORMERS_OFFLINE",
    "HF_HOME",
    "WANDB_API_KEY",
)
KEPT_BACK = (
    "AWS_SECRET_ACCESS_KEY",
    "OPENAI_API_KEY",
    "GITHUB_TOKEN",
    "UV_INDEX_URL",
    "HTTPS_PROXY",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PATH",
    "LD_LIBRARY_PATH",
    "RAY_ADDRESS",
    "SLURM_JOB_ID",
)


def test_library_variables_are_forwarded_and_secrets_are_not() -> None:
    environment = dict.fromkeys((*FORWARDED, *KEPT_BACK), "x")
    assert sorted(forwarded_environment(environment)) == sorted(FORWARDED)


def test_a_joined_ray_gets_the_forwarded_variables(monkeypatch) -> None:
    given = {}

    class Context:
        address_info = {"session_dir": "/nonexistent"}

    def init(**arguments):
        given.update(arguments)
        return Context()

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(virtual_cluster, "require_cluster", lambda: None)
    monkeypatch.setattr(joined_ray, "watch_joined_ray", lambda: None)
    init_ray(env_vars={"NVTE_FLASH_ATTN": "0", "MINE": "1"})
    variables = given["runtime_env"]["env_vars"]
    assert variables["NVTE_FLASH_ATTN"] == "0" and variables["MINE"] == "1"
    assert "OPENAI_API_KEY" not in variables
