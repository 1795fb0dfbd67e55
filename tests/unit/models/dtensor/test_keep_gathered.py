"""`dtensor_cfg.keep_gathered`: each weight is gathered once for an update, and the numbers stay the same."""

from typing import Any

import pytest
import torch
from policy_helpers import WeightedNLL, policy_config, random_batch, run_ranks, save_tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl.distributed.ranks.placements import whole
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker

CPU = torch.device("cpu")
SMALL_PACKS = {"sequence_packing": {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 32}}
MICROBATCHES = 4
DATA = random_batch(rows=2 * MICROBATCHES, width=24)
DATA["input_lengths"][:] = 24
UNITS = 3
"""FSDP2's units of the model: two layers, and the root."""


class Gathers(TorchDispatchMode):
    """Counts all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "allgather_base" in str(func)
        return func(*args, **(kwargs or {}))


def updates(rank: int, world_size: int, name: str, keep: bool, dtype: str) -> dict[str, Any]:
    """Make two updates of several microbatches; return the gathers of the second, scores and weights after them."""
    config = policy_config(name, precision=dtype, dtensor_cfg={"keep_gathered": keep}, **SMALL_PACKS)
    worker = PolicyWorker(DTensorBackend(config, CPU, init_reference_model=False), config)
    batch = shard_batch(DATA, world_size, training_strategy(config), shares_prompts=False)
    gathers = 0
    for _ in range(2):
        with Gathers() as counted:
            worker.train(batch.data[rank], batch.sizes[rank], WeightedNLL(), count_valid(DATA))
        gathers = counted.count
    scored = shard_batch(DATA, world_size, logprob_strategy(config), shares_prompts=False)
    weights = {key: whole(value.detach()).clone() for key, value in worker.backend.model.hf.named_parameters()}
    return {
        "gathers": gathers,
        "scores": worker.get_logprobs(scored.data[rank], scored.sizes[rank]),
        "weights": weights,
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_gathered_once_and_numbers_stay(dtype: str, tmp_path) -> None:
    name = save_tiny_model(tmp_path, "qwen2")
    kept, freed = (run_ranks(updates, 2, name, keep, dtype) for keep in (True, False))
    for with_key, without in zip(kept, freed, strict=True):
        assert with_key["gathers"] == UNITS
        assert without["gathers"] >= MICROBATCHES * UNITS
        assert torch.equal(with_key["scores"], without["scores"])
        assert with_key["weights"].keys() == without["weights"].keys()
        for key, weight in with_key["weights"].items():
            assert torch.equal(weight, without["weights"][key]), key
