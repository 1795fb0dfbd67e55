"""Measure the memory of training steps on CPU ranks and compare it with the prediction made before a run.

    .venv/bin/python tools/measure_memory.py [--backend dtensor] [--ranks 4] [--set tensor_parallel_size=2] ...

A random model is trained for two updates in forked gloo ranks. The result is the peak of allocated bytes during the
second update (when gradients of earlier microbatches and the optimizer's state exist), on the rank with the highest
peak: the tensors alive before the update, plus every allocation and release during it, from torch's profiler. This is
what `torch.cuda.max_memory_allocated` counts on a GPU. The resident set is shown too: the C library keeps freed memory,
so it also depends on the order of sizes.

Without arguments it measures the tables of `docs/development/training-backends.md`.
"""

import argparse
import gc
import json
import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.losses.loss_function import LossFunction, LossInputType, LossType
from nemo_rl.losses.supervised import NLLLossFn
from nemo_rl.models.capacity.memory import Work, microbatch_tokens
from nemo_rl.models.dtensor.mesh_check import DTensorRank
from nemo_rl.models.megatron.mesh_check import MeshPlace
from nemo_rl.models.policy.batching import count_valid, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.models.training.backends import training_backend
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.imports import import_dotted

MIB = 2**20
PREDICTIONS = {"dtensor": DTensorRank.predict, "megatron": MeshPlace.predict}
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Setting:
    """One training run to measure.

    Attributes:
        name: name in the table.
        ranks: number of processes.
        rows: samples of a microbatch.
        length: tokens of a sample.
        microbatches: microbatches of an update on each data-parallel rank.
        keys: keys of the backend's section.
        shape: fields of the model's configuration.
        packed: pack all samples of a microbatch into one row.
        precision: precision of the forward and backward pass.
        reference: keep the initial weights.
        backend: training backend, by the name of its folder.
        critic: train the values of a scalar head instead of log-probabilities.
        reward_model: train the scores of a scalar head for whole rows.
    """

    name: str
    ranks: int = 1
    rows: int = 2
    length: int = 512
    microbatches: int = 2
    keys: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    model_type: str = "qwen2"
    packed: bool = False
    precision: str = "float32"
    reference: bool = False
    backend: str = "dtensor"
    critic: bool = False
    reward_model: bool = False

    @property
    def loss_fn(self) -> LossFunction:
        """The loss that is trained on."""
        if self.reward_model:
            return SquaredScores()
        return SquaredValues() if self.critic else NLLLossFn()

    def policy(self, model_name: str) -> PolicyConfig:
        """Build the policy section."""
        keys: dict[str, Any] = {"dtensor_cfg": {"enabled": False}}
        keys[f"{self.backend}_cfg"] = self.keys | {"enabled": True}
        if self.packed:
            keys["sequence_packing"] = {"enabled": True, "train_mb_tokens": self.rows * self.length}
        else:
            keys["sequence_packing"] = {"enabled": False}
        policy = PolicyConfig.build(
            model_name=model_name,
            precision=self.precision,
            max_total_sequence_length=self.length,
            train_micro_batch_size=self.rows,
            generation=None,
            reward_model_cfg={"enabled": self.critic or self.reward_model},
            **keys,
        )
        copies = ParallelLayout.of(policy, self.ranks).data_parallel_size
        policy.train_global_batch_size = self.rows * self.microbatches * copies
        return policy


_TP, _SP = {"tensor_parallel_size": 2}, {"sequence_parallel": True}
_CP, _PP, _EP = {"context_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"expert_parallel_size": 2}
_EXPERTS = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
SETTINGS = (
    Setting("1 rank"),
    Setting("1 rank, packed", packed=True),
    Setting("1 rank, 1 microbatch", microbatches=1),
    Setting("1 rank, checkpointing", keys={"activation_checkpointing": True}),
    Setting("1 rank, selective checkpointing", keys={"activation_checkpointing": "selective"}),
    Setting("1 rank, 1024 tokens", length=1024),
    Setting("1 rank, heads of 128, reference kept", shape={"head_dim": 128}, model_type="qwen3", reference=True),
    Setting("1 rank, bfloat16", precision="bfloat16"),
    Setting("1 rank, critic", critic=True),
    Setting("1 rank, critic, bfloat16", critic=True, precision="bfloat16"),
    Setting("1 rank, reward model", reward_model=True),
    Setting("1 rank, reward model, bfloat16", reward_model=True, precision="bfloat16"),
    Setting("dp_shard 2", ranks=2),
    Setting(
        "dp_shard 2, bfloat16, checkpointing", ranks=2, precision="bfloat16", keys={"activation_checkpointing": True}
    ),
    Setting("dp_shard 4, packed", ranks=4, rows=1, length=1024, packed=True),
    Setting("dp_replicate 2 x dp_shard 2", ranks=4, rows=1, keys={"dp_replicate_size": 2}),
    Setting("tp 2", ranks=2, keys=_TP),
    Setting("tp 2 + sequence parallel", ranks=2, keys=_TP | _SP),
    Setting("cp 2", ranks=2, keys=_CP),
    Setting("cp 2, ulysses, packed", ranks=2, packed=True, keys=_CP | {"context_parallel_method": "ulysses"}),
    Setting("pp 2", ranks=2, microbatches=4, keys=_PP),
    Setting("pp 2, interleaved", ranks=2, microbatches=4, keys=_PP | {"virtual_pipeline_size": 2}),
    Setting("1 rank, mixture", shape=_EXPERTS, model_type="qwen3_moe"),
    Setting("ep 2, mixture", ranks=2, shape=_EXPERTS, model_type="qwen3_moe", keys=_EP),
    Setting("dp_shard 2 x tp 2 + sequence parallel", ranks=4, keys=_TP | _SP),
    Setting("cp 2 x tp 2 + sequence parallel", ranks=4, keys=_CP | _TP | _SP),
    Setting("pp 2 x tp 2 + sequence parallel", ranks=4, microbatches=4, keys=_PP | _TP | _SP),
    Setting("dp_shard 4, ep 2, mixture", ranks=4, rows=1, shape=_EXPERTS, model_type="qwen3_moe", keys=_EP),
)
_MEGATRON_TP, _MEGATRON_PP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
_WHOLE_STATE = {"optimizer": {"use_distributed_optimizer": False}}
_MEGATRON = partial(Setting, backend="megatron")
SETTINGS_OF_MEGATRON = (
    _MEGATRON("megatron, 1 rank"),
    _MEGATRON("megatron, 1 rank, packed", packed=True),
    _MEGATRON("megatron, 1 rank, recomputed", keys={"activation_checkpointing": True}),
    _MEGATRON("megatron, 1 rank, bfloat16", precision="bfloat16"),
    _MEGATRON("megatron, 1 rank, reference kept", reference=True),
    _MEGATRON("megatron, 1 rank, critic", critic=True),
    _MEGATRON("megatron, 1 rank, critic, bfloat16", critic=True, precision="bfloat16"),
    _MEGATRON("megatron, dp 2", ranks=2),
    _MEGATRON("megatron, dp 2, whole state", ranks=2, keys=_WHOLE_STATE),
    _MEGATRON("megatron, tp 2", ranks=2, keys=_MEGATRON_TP),
    _MEGATRON("megatron, tp 2 + sequence parallel", ranks=2, keys=_MEGATRON_TP | _SP),
    _MEGATRON("megatron, cp 2", ranks=2, keys=_CP),
    _MEGATRON("megatron, pp 2", ranks=2, microbatches=4, keys=_MEGATRON_PP),
    _MEGATRON(
        "megatron, pp 2, interleaved",
        ranks=2,
        microbatches=4,
        keys=_MEGATRON_PP | {"virtual_pipeline_model_parallel_size": 2},
    ),
    _MEGATRON("megatron, 1 rank, mixture", shape=_EXPERTS, model_type="qwen3_moe"),
    _MEGATRON(
        "megatron, ep 2, mixture",
        ranks=2,
        shape=_EXPERTS,
        model_type="qwen3_moe",
        keys={"expert_model_parallel_size": 2},
    ),
)


class SquaredValues:
    """Mean square of the values of all tokens: a critic's loss with returns of zero."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.VALUE
    needs_reference = False
    rows_per_unit = 1

    def __call__(
        self, values: Tensor, data: Any, global_valid_seqs: Any, global_valid_toks: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the loss of one microbatch."""
        loss = (values.square() * data["token_mask"][:, 1:]).sum() / global_valid_toks
        return loss, {"loss": loss.detach()}


class SquaredScores:
    """Mean square of the scores of rows: a reward model's loss."""

    loss_type = LossType.SEQUENCE_LEVEL
    input_type = LossInputType.LOGIT
    needs_reference = False
    rows_per_unit = 1

    def __call__(
        self, scores: Tensor, data: Any, global_valid_seqs: Any, global_valid_toks: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the loss of one microbatch."""
        loss = (scores[:, 0].square() * data["sample_mask"]).sum() / global_valid_seqs
        return loss, {"loss": loss.detach()}


def random_rows(policy: PolicyConfig, vocabulary: int) -> BatchedDataDict[Any]:
    """Return a global batch of full rows; all tokens count in the loss."""
    rows, length = policy.train_global_batch_size, policy.max_total_sequence_length
    ids = torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.full((rows,), length),
            "token_mask": torch.ones(rows, length),
            "sample_mask": torch.ones(rows),
        }
    )


def measured_bytes(policy: PolicyConfig, reference: bool, vocabulary: int, loss_fn: LossFunction) -> dict[str, float]:
    """Measure the peak of the second update on this rank, in bytes; needs a process group."""
    layout = ParallelLayout.of(policy, dist.get_world_size())
    backend_class = import_dotted(training_backend(policy).rank_class, ConfigError, "rank_class", "")
    backend = backend_class(policy, torch.device("cpu"), layout, init_reference_model=reference)
    worker = PolicyWorker(backend, policy)
    data = random_rows(policy, vocabulary)
    place = layout.data_parallel_rank(dist.get_rank())
    batch = shard_batch(data, layout.data_parallel_size, training_strategy(policy))
    rows, sizes = batch.data[place], batch.sizes[place]
    worker.train(rows, sizes, loss_fn, count_valid(data))
    if reference:
        with backend.reference_weights():
            pass
    before = alive_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the resident set
    resident = _status("VmRSS")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        worker.train(rows, sizes, loss_fn, count_valid(data))
    return {
        "alive": before,
        "peak": before + highest_bytes(recorded),
        "resident": before + _status("VmHWM") - resident,
    }


def alive_bytes() -> float:
    """Return the bytes of all tensors of this process: weights, gradients, optimizer state, reference weights, data."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (tensor.untyped_storage() for tensor in local if tensor.device.type == "cpu")
    }
    return float(sum(storages.values()))


def highest_bytes(recorded: Any) -> float:
    """Return the largest running sum of allocations minus releases."""
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return float(highest)


def _status(field_name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field_name}:"))


def measure(setting: Setting) -> tuple[dict[str, float], float, str]:
    """Return the highest measured peak of any rank, the predicted peak, and the moment of the predicted peak."""
    config = AutoConfig.for_model(setting.model_type, **SHAPE | setting.shape)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(f"{folder}/model")
        policy = setting.policy(f"{folder}/model")
        port = _free_port()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            mp.start_processes(_rank_main, (setting, policy, port, folder), nprocs=setting.ranks, start_method="fork")
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(setting.ranks)]
    work = Work(
        microbatch_tokens(policy, trains=True),
        several=setting.microbatches > 1,
        keeps_reference=setting.reference,
        on_cpu=True,
        scores_rows=setting.reward_model,
    )
    plan = PREDICTIONS[setting.backend](policy, ParallelLayout.of(policy, setting.ranks), config, work)
    return max(found, key=lambda each: each["peak"]), plan.peak, plan.peak_moment


def _rank_main(rank: int, setting: Setting, policy: PolicyConfig, port: int, folder: str) -> None:
    with _process_group(rank, setting.ranks, port):
        found = measured_bytes(policy, setting.reference, int(SHAPE["vocab_size"]), setting.loss_fn)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


@contextmanager
def _process_group(rank: int, ranks: int, port: int) -> Iterator[None]:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def table(settings: Sequence[Setting]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| setting | measured MiB | predicted MiB | difference | predicted peak | resident set MiB |"
    yield "|---|---|---|---|---|---|"
    for setting in settings:
        found, predicted, moment = measure(setting)
        peak = found["peak"]
        yield (
            f"| {setting.name} | {peak / MIB:.0f} | {predicted / MIB:.0f} | {predicted / peak - 1:+.1%} | {moment} | "
            f"{found['resident'] / MIB:.0f} |"
        )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="number of processes; measures one setting of your own")
    parser.add_argument("--set", nargs="*", default=[], help="keys of the backend's section, as key=value")
    parser.add_argument("--backend", choices=PREDICTIONS, default="dtensor", help="backend of your own setting")
    parser.add_argument("--rows", type=int, default=2, help="samples of a microbatch")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample")
    parser.add_argument("--model-type", default="qwen2", help="architecture, as transformers names it")
    parser.add_argument("--shape", nargs="*", default=[], help="fields of the model's configuration, as key=value")
    parser.add_argument("--packed", action="store_true", help="pack the samples of a microbatch")
    parser.add_argument("--only", nargs="+", default=[""], help="measure settings whose name contains a text")
    given = parser.parse_args()
    settings = [
        setting for setting in SETTINGS + SETTINGS_OF_MEGATRON if any(text in setting.name for text in given.only)
    ]
    if given.ranks:
        keys, shape = (
            {key: yaml.safe_load(value) for key, value in (pair.split("=", 1) for pair in pairs)}
            for pairs in (given.set, given.shape)
        )
        own = Setting(
            f"{given.ranks} ranks {' '.join(given.set)}", ranks=given.ranks, rows=given.rows, backend=given.backend
        )
        settings = [
            replace(own, length=given.length, keys=keys, shape=shape, model_type=given.model_type, packed=given.packed)
        ]
    for line in table(settings):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
