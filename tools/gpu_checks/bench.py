"""Provide the objects that checks use: a device, random models in folders, and one policy rank at a time.

The rank is the library's own `PolicyRank`, built as in a Ray worker, alone in its process group. Invariant: at most one
rank exists at a time, because a process has one default process group.
"""

import gc
import os
import platform
import socket
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tiny_models import make_char_tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from gpu_checks.engine_process import EngineProcess
from gpu_checks.runner import Setting
from gpu_checks.shapes import SHAPES
from nemo_rl.config import PolicyConfig
from nemo_rl.data.packing import MicrobatchStrategy
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.host.device import device_for
from nemo_rl.losses.supervised import NLLLossFn
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.policy.batching import (
    ShardedBatch,
    count_valid,
    logprob_strategy,
    shard_batch,
    training_strategy,
)
from nemo_rl.models.policy.workers.rank import PolicyRank, UpdateResult, WorkerSettings
from nemo_rl.models.training.backends import training_backend

type Rows = BatchedDataDict[Any]
GIB = 1 << 30


class Bench:
    """See the module docstring.

    Attributes:
        setting: settings of this worker.
        device: device of the checks.
    """

    def __init__(self, setting: Setting):
        self.setting = setting
        self._device = device_for(uses_gpu=not setting.cpu)
        if setting.cpu:  # the work is tiny, and more threads would wait for each other on a busy machine
            torch.set_num_threads(1)
            os.environ["OMP_NUM_THREADS"] = "1"
        self.device = self._device.activate()
        self._rank: PolicyRank | None = None
        self._key: tuple[str, str] | None = None
        self._engine: EngineProcess | None = None
        transformers_logging.disable_progress_bar()

    @property
    def on_gpu(self) -> bool:
        """Whether the checks run on a GPU."""
        return self._device.is_gpu

    @property
    def large(self) -> str:
        """Name of the shape whose speed is measured."""
        return "qwen2.5-1.5b" if self.on_gpu else "qwen2"

    @property
    def large_pack(self) -> int:
        """Tokens per pack for which the large model's rank is made; batches may use other sizes."""
        return 2048 if self.on_gpu else 128

    def machine(self) -> dict[str, Any]:
        """Return facts about the machine on which the figures depend."""
        facts: dict[str, Any] = {"device": platform.processor() or platform.machine(), "cpus": os.cpu_count()}
        if self.on_gpu:
            properties = torch.cuda.get_device_properties(self.device)
            facts |= {
                "device": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "memory_gib": properties.total_memory / GIB,
                "cuda": torch.version.cuda,
            }
        versions = {name: version(name) for name in ("torch", "transformers")}
        return facts | {"python": platform.python_version()} | versions

    def folder(self, shape: str, *, as_trained: bool = True) -> str:
        """Return the folder of a model of this shape; the same for every call.

        Args:
            shape: a name of `SHAPES`.
            as_trained: return the model that the policy loads, which a planted fault changes.
        """
        fault = as_trained and self.setting.plant_fault
        path = Path(self.setting.folder) / (shape + "-changed" * fault)
        if not path.exists():
            model = self._random_model(shape)
            if fault:
                _change_a_weight(model)
            model.save_pretrained(path)
            self.empty_cache()
        return str(path)

    def _random_model(self, shape: str) -> PreTrainedModel:
        entry = SHAPES[shape]
        torch.manual_seed(7)
        with self.device:
            return AutoModelForCausalLM.from_config(
                AutoConfig.for_model(entry.model_type, **entry.fields), dtype=entry.dtype
            )

    def policy(self, shape: str, *, fresh: bool = True, **values: Any) -> PolicyRank:
        """Return a policy rank with this model; the previous one is ended.

        Args:
            shape: a name of `SHAPES`.
            fresh: make a new rank even if the last one had the same keys.
            **values: keys of the policy section.
        """
        key = (shape, repr(sorted(values.items())))
        if self._rank is None or fresh or self._key != key:
            self.end_policy()
            self._rank = self._new_rank(policy_config(self.folder(shape), **values))
            self._key = key
        return self._rank

    def large_policy(self, **values: Any) -> PolicyRank:
        """Return the large model's bfloat16 rank, shared by its checks; its learning rate is too small to diverge."""
        slow = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-6}}
        keys = {"precision": "bfloat16", "optimizer": slow, **packed(self.large_pack)}
        return self.policy(self.large, fresh=False, **{**keys, **values})

    def _new_rank(self, config: PolicyConfig) -> PolicyRank:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(free_port())
        settings = WorkerSettings(
            backend=training_backend(config).rank_class,
            layout=ParallelLayout.of(config, 1),
            uses_gpu=self.on_gpu,
            num_threads=None if self.on_gpu else 1,
            ranks_per_node=1,
            collective_timeout_s=60.0,
            seed=0,
            init_optimizer=config.optimizer is not None,
            init_reference_model=config.optimizer is not None,
        )
        return PolicyRank(config, settings)

    def end_policy(self) -> None:
        """End the rank and free its memory."""
        if self._rank is not None:
            self._rank.shutdown()
            self._rank = None
            self.empty_cache()

    def engine(self, shape: str, precision: str) -> EngineProcess:
        """Return a Hugging Face engine with this untrained model in a separate process; reuse it for equal settings."""
        folder = self.folder(shape)
        make_char_tokenizer().save_pretrained(folder)
        settings = EngineSettings("hf", folder, folder, self.device.type, precision, max_model_len=256)
        if self._engine is None or self._engine.settings != settings:
            self.end_engine()
            self._engine = EngineProcess(settings)
        return self._engine

    def end_engine(self) -> None:
        """End the engine's process."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def empty_cache(self) -> None:
        """Free unused memory."""
        gc.collect()
        self._device.empty_cache()

    def synchronize(self) -> None:
        """Wait for the device."""
        self._device.synchronize()

    def reset_peak(self) -> None:
        """Reset the measurement of `peak_gib`."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        """Return the peak of tensor memory on the GPU since `reset_peak`, in GiB; None on a CPU."""
        return torch.cuda.max_memory_allocated() / GIB if self.on_gpu else None


def policy_config(folder: str, **values: Any) -> PolicyConfig:
    """Return the policy section of a check: one padded row per microbatch, float32, AdamW, no clipping."""
    defaults: dict[str, Any] = {
        "model_name": folder,
        "precision": "float32",
        "max_total_sequence_length": 1024,
        "train_global_batch_size": 6,
        "train_micro_batch_size": 2,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2, "weight_decay": 0.01}},
        "generation": None,
        "sequence_packing": {"enabled": False},
        "max_grad_norm": None,
    }
    return PolicyConfig.build(**{**defaults, **values})


def packed(tokens: int) -> dict[str, Any]:
    """Return the keys for packed microbatches of this many tokens."""
    return {"sequence_packing": {"enabled": True, "train_mb_tokens": tokens, "logprob_mb_tokens": tokens}}


def random_rows(lengths: list[int], vocab_size: int = 256, seed: int = 0) -> Rows:
    """Return right-padded random rows of these lengths; all tokens except each row's first two count in the loss."""
    generator = torch.Generator().manual_seed(seed)
    length_B = torch.tensor(lengths)
    real_BT = torch.arange(max(lengths))[None] < length_B[:, None]
    ids_BT = torch.randint(3, vocab_size, real_BT.shape, generator=generator) * real_BT
    counts_BT = real_BT.clone()
    counts_BT[:, :2] = False
    return BatchedDataDict(
        {
            "input_ids": ids_BT,
            "input_lengths": length_B,
            "token_mask": counts_BT.float(),
            "sample_mask": torch.ones(len(lengths)),
        }
    )


def update(rank: PolicyRank, config: PolicyConfig, rows: Rows) -> UpdateResult:
    """Run one optimizer update on the negative log-likelihood of the rows."""
    batch = laid_out(rank, config, rows, training_strategy(config))
    return rank.train(batch.data[0], batch.sizes[0], NLLLossFn(), count_valid(rows))


def scores(rank: PolicyRank, config: PolicyConfig, rows: Rows, *, reference: bool = False) -> Tensor:
    """Return `[B, T]` log-probabilities of the rows, under the current or the reference weights."""
    batch = laid_out(rank, config, rows, logprob_strategy(config))
    score = rank.get_reference_policy_logprobs if reference else rank.get_logprobs
    return batch.restore([score(batch.data[0], batch.sizes[0])])


def laid_out(rank: PolicyRank, config: PolicyConfig, rows: Rows, strategy: MicrobatchStrategy) -> ShardedBatch:
    """Divide rows into microbatches like `Policy`: they share tokens if both the rank and the configuration do."""
    packing = config.sequence_packing
    shares = packing.enabled and packing.share_prompts and rank.shares_prompts()
    return shard_batch(rows, 1, strategy, shares_prompts=shares)


def weights_of(rank: PolicyRank) -> dict[str, Tensor]:
    """Return copies of all weights on the CPU, float32."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in rank.iterate_weights()}


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@torch.no_grad()
def _change_a_weight(model: PreTrainedModel) -> None:
    """Plant the fault: change one number in the last layer."""
    name = [name for name, _ in model.named_parameters() if name.endswith("down_proj.weight")][-1]
    model.get_parameter(name)[3, 5] += 100.0
