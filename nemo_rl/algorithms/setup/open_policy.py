"""Open a policy without a run, for notebooks, scripts and experiments with losses.

The policy is a `models.policy.lm_policy.Policy` with defaults for one batch at a time. The policies of runs are started
by `roles`. Invariant: all processes started here end with `shutdown`, the `with` block or the Python process.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, cast

import torch

from nemo_rl.algorithms.setup.packages import check_training_packages
from nemo_rl.algorithms.setup.roles import make_clusters
from nemo_rl.config import ClusterConfig, PolicyConfig, count_gpus, find_path, plan_topology
from nemo_rl.config.rules.models import trust_models
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.losses.loss_function import AnyLossFunction, LossFunction, LossInputType
from nemo_rl.models.huggingface.tensor_files import download_models
from nemo_rl.models.policy.batching import require_keys
from nemo_rl.models.policy.interfaces import TrainResult
from nemo_rl.models.policy.lm_policy import TRAINING_KEYS, Policy
from nemo_rl.models.policy.workers.loss_calls import extra_keys, input_type_of
from nemo_rl.models.training.backends import training_backend
from nemo_rl.utils.addresses import cluster_address
from nemo_rl.utils.errors import ConfigError

_OF_TOKENS = (LossInputType.LOGPROB, LossInputType.VALUE)
"""Input types of losses whose input is one number per token."""


class OpenPolicy(Policy):
    """A model with its optimizer in separate processes, as `open_policy` returns it.

    Args:
        cluster: device and number of processes.
        seed: seed of dropout and of the initial values of adapters.
    """

    def __init__(self, config: PolicyConfig, cluster: ClusterConfig, seed: int = 0) -> None:
        trust_models([("model_name", "tokenizer.name", config)])
        tokenizer = get_tokenizer(config.tokenizer)
        check_training_packages(config, cluster)
        training_backend(config).check(config, plan_topology(cluster, config).policy_ranks)
        download_models([config.model_name])
        init_ray(optimizations=cluster.optimizations)
        self._places = make_clusters(cluster, config)[0]
        with ExitStack() as undo:
            undo.callback(self._places.shutdown)
            super().__init__(
                self._places,
                config,
                tokenizer,
                name_prefix="open_policy",
                timeouts=cluster.timeouts,
                threads_per_rank=cluster.threads_per_rank,
                seed=seed,
                venv=cluster.venvs.get("policy"),
                optimizations=cluster.optimizations,
            )
            undo.pop_all()

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: AnyLossFunction,
        eval_mode: bool = False,
        gbs: int | Sequence[int] | None = None,
        mbs: int | None = None,
    ) -> TrainResult:
        """Train as `Policy.train` does. If `gbs` is None, make one update with the whole batch.

        On the CPU, the loss is first called on one row in this process. A mistake in the loss then raises an error
        here, whereas an exception in a worker would end all workers.
        """
        require_keys(data, [*TRAINING_KEYS, *extra_keys(loss_fn)], "train")
        if not self._places.use_gpus and input_type_of(loss_fn) in _OF_TOKENS:
            try_out(cast(LossFunction, loss_fn), data)
        return super().train(data, loss_fn, eval_mode, gbs or data.size, mbs)

    def shutdown(self) -> bool:
        """End the processes, and return whether all of them ended cleanly."""
        clean = super().shutdown()
        self._places.shutdown()
        return clean

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes."""
        self.shutdown()


def open_policy(
    model_name: str,
    *,
    device: str = "cpu",
    learning_rate: float | None = None,
    ranks: int = 1,
    seed: int = 0,
    **policy_keys: Any,
) -> OpenPolicy:
    """Load a model for training, and block until its processes are ready.

    Args:
        model_name: Hugging Face id or folder.
        device: "cpu", or "cuda" for GPUs. On the CPU the precision is float32 unless `precision` is given.
        learning_rate: Learning rate of AdamW without weight decay. If None, `optimizer` in `policy_keys` is used.
        ranks: Number of processes that share the model. On GPUs, each process uses one GPU.
        seed: Seed of dropout and of the initial values of adapters.
        policy_keys: Any other key of the `policy` section (docs/reference/configuration.md), sections as dicts;
            for example `dtensor_cfg={"lora_cfg": {"enabled": True}}`.

    Raises:
        ConfigError: A key is unknown or out of range, the model cannot be found, or there are fewer GPUs than ranks.

    Example:
        >>> with open_policy("Qwen/Qwen2.5-0.5B-Instruct", device="cpu", learning_rate=1e-5) as policy:
        ...     result = policy.train(batch, loss_fn)
    """
    config = _policy_config(model_name, learning_rate, policy_keys)
    cluster = ClusterConfig.build(device=device, gpus_per_node=ranks, ranks_per_node=ranks)
    _require_gpus(cluster)
    if "precision" not in policy_keys and not cluster.uses_gpu:
        config.precision = "float32"
    return OpenPolicy(config, cluster, seed)


def try_out(loss_fn: LossFunction, data: BatchedDataDict[Any]) -> Any:
    """Call a loss with made-up log-probabilities or values, and return its result."""
    rows = data.slice(0, getattr(loss_fn, "rows_per_unit", 1))
    num_rows, num_tokens = rows["input_ids"].shape
    scores = torch.full((num_rows, num_tokens - 1), -1.0, requires_grad=True)
    one = torch.ones(())
    return loss_fn(scores, data=rows, global_valid_seqs=one, global_valid_toks=one)


def _require_gpus(cluster: ClusterConfig) -> None:
    """Check the number of GPUs as `config.check_device` does. The error names the arguments of `open_policy`."""
    if not cluster.uses_gpu or cluster_address():
        return
    found = count_gpus()
    if found < cluster.gpus_per_node:
        raise ConfigError(
            f"device={cluster.device!r} with ranks={cluster.gpus_per_node} needs as many GPUs, and this machine shows "
            f"{found}. Use fewer ranks or device='cpu', or set RAY_ADDRESS to join a cluster that has them."
        )


def _policy_config(model_name: str, learning_rate: float | None, policy_keys: dict[str, Any]) -> PolicyConfig:
    if "train_global_batch_size" in policy_keys:
        raise ConfigError(
            "train_global_batch_size has no effect here: train(batch, loss_fn) makes one update of the whole batch. "
            "Leave the key out; for several updates of a batch call train(batch, loss_fn, gbs=...)."
        )
    if learning_rate is not None and "optimizer" in policy_keys:
        raise ConfigError("Both learning_rate and optimizer are given; set the rate only in optimizer['kwargs']['lr'].")
    values: dict[str, Any] = {"generation": None, **policy_keys}
    megatron = values.get("megatron_cfg")
    if learning_rate is not None and megatron is not None and megatron.get("enabled"):
        raise ConfigError("learning_rate is used by AdamW only; with megatron_cfg set megatron_cfg['optimizer']['lr'].")
    if learning_rate is not None:
        values["optimizer"] = {"name": "torch.optim.AdamW", "kwargs": {"lr": learning_rate, "weight_decay": 0.0}}
    return PolicyConfig.build(model_name=str(find_path(model_name) or model_name), **values)
