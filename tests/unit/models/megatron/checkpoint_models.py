"""A small model in training by the Megatron backend that saves and loads, and a comparison of two states."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mtp_cases import mtp_model
from rank_backend import CPU, backend_of, policy_of
from small_models import VOCAB, hf_model
from torch import Tensor

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.training.inputs import InputLayout, build_training_inputs
from nemo_rl.models.training.interfaces import CheckpointPaths

ROWS, LENGTH = 4, 16
_RATES = {"lr_decay_style": "cosine", "lr_decay_iters": 20, "lr_warmup_iters": 2}


@dataclass(frozen=True)
class Mesh:
    """How ranks divide a model; the remaining ranks are data parallel.

    Attributes:
        mtp: number of layers for multi-token prediction.
        options: further keys of the optimizer.
    """

    kind: str = "llama"
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int = 1
    sp: bool = False
    distributed: bool = False
    precision: str = "float32"
    optimizer: str = "adam"
    num_layers: int = 2
    scores: bool = False
    mtp: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def model(self, seed: int = 1) -> Any:
        """Make the Hugging Face model in float32."""
        if self.mtp:
            return mtp_model(self.mtp, seed, num_hidden_layers=self.num_layers)
        return hf_model(self.kind, seed, scores=self.scores, num_hidden_layers=self.num_layers)

    def policy(self) -> dict[str, Any]:
        """Return the section that `rank_backend.policy_of` makes."""
        sizes = {name: getattr(self, name) for name in ("tp", "pp", "vpp", "ep", "etp", "sp", "precision")}
        sizes |= {"mtp_num_layers": self.mtp, "mtp_loss_scaling_factor": 0.5} if self.mtp else {}
        optimizer = {
            "optimizer": self.optimizer,
            "lr": 1e-2,
            "min_lr": 1e-4,
            "use_distributed_optimizer": self.distributed,
        } | self.options
        return {**sizes, "optimizer": optimizer, "scheduler": _RATES, "reward_model_cfg": {"enabled": self.scores}}


class Run:
    """A model in training on this rank; its groups of Megatron Core are made again.

    Attributes:
        backend: the rank's.
    """

    def __init__(self, mesh: Mesh, seed: int = 1) -> None:
        self.backend = backend_of(mesh.model(seed), **mesh.policy())
        self._layout = ParallelLayout.of(policy_of(**mesh.policy()), dist.get_world_size())

    def update(self, step: int) -> float:
        """Run one optimizer update; return the loss of the batch, on all ranks."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        with get_cuda_rng_tracker().fork():
            torch.rand(1)  # as dropout in divided layers
        ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        ids = (ids + torch.randint(0, 2, ids.shape)) % VOCAB  # draws from the process's generator, as dropout does
        dist.broadcast(ids, 0)
        mine = ids.chunk(self._layout.data_parallel_size)[self._layout.data_parallel_rank(dist.get_rank())]
        count, losses = ROWS * (LENGTH - 1), []

        def forward_step(index: int, logprobs_K: Tensor, entropy_K: Tensor) -> Tensor:
            loss = -logprobs_K.sum() / count
            losses.append(loss.item())
            return loss

        rows = [build_training_inputs(_as_batch(row), InputLayout(packed=False), CPU) for row in mine[:, None]]
        self.backend.run(rows, forward_step, backward=True)
        assert self.backend.clip_and_step()[1]
        self.backend.advance_schedule()
        total = torch.tensor(sum(losses) if dist.get_rank() in self._layout.result_ranks else 0.0)
        dist.all_reduce(total)
        return total.item()

    def optimizers(self) -> list[Any]:
        """Return the optimizers of torch, one for each part of Megatron Core's."""
        from nemo_rl.models.megatron.optimizer import parts_of

        return [member.optimizer for member in parts_of(self.backend.optimizer)]

    def state(self) -> dict[str, Any]:
        """Return copies of all state on this rank."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        found: dict[str, Any] = {"schedule": self.backend.scheduler.state_dict(), "rng": torch.get_rng_state()}
        found |= {f"rng {name}": state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}
        for index, chunk in enumerate(self.backend.chunks):
            found |= {f"{index}.{name}": tensor.detach().clone() for name, tensor in chunk.module.named_parameters()}
        for number, optimizer in enumerate(self.optimizers()):
            groups = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
            found[f"{number}.groups"] = groups
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for index, parameter in enumerate(parameters):
                found[f"{number}.{index}.main"] = parameter.detach().clone()
                for name, value in optimizer.state[parameter].items():
                    found[f"{number}.{index}.{name}"] = value.clone() if isinstance(value, Tensor) else value
        return found

    def save(self, folder: Path) -> None:
        self.backend.save(paths_in(folder))

    def load(self, folder: Path) -> None:
        self.backend.load(paths_in(folder))


def _as_batch(ids_1T: Tensor) -> BatchedDataDict[Any]:
    ones = torch.ones(ids_1T.shape)
    lengths = torch.tensor([ids_1T.shape[1]])
    return BatchedDataDict(
        {"input_ids": ids_1T, "input_lengths": lengths, "token_mask": ones, "sample_mask": torch.ones(1)}
    )


def paths_in(folder: Path) -> CheckpointPaths:
    return CheckpointPaths(folder / "policy" / "weights", folder / "policy" / "optimizer")


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names under which two states of `Run.state` differ in any bit."""

    def same(name: str) -> bool:
        a, b = one[name], other[name]
        return torch.equal(a, b) if isinstance(a, Tensor) else a == b

    return sorted(one.keys() ^ other.keys()) + [name for name in sorted(one.keys() & other.keys()) if not same(name)]
