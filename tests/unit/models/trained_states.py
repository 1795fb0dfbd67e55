"""Train a policy worker, and compare all of its state: weights, optimizer, learning rate."""

import torch
from policy_helpers import WeightedNLL, random_batch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemo_rl.config import PolicyConfig
from nemo_rl.models.policy.batching import count_valid, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker, UpdateResult


def update(worker: PolicyWorker, config: PolicyConfig, seed: int, rank: int = 0, world_size: int = 1) -> UpdateResult:
    """Train on a random batch."""
    data = random_batch(rows=6, seed=seed)
    batch = shard_batch(data, world_size, training_strategy(config))
    return worker.train(batch.data[rank], batch.sizes[rank], WeightedNLL(), count_valid(data))


def whole_state(worker: PolicyWorker) -> dict[str, Tensor]:
    """Return all weights, the optimizer's state and the learning rate as full tensors."""
    state = {f"weight.{key}": tensor.clone() for key, tensor in worker.iterate_weights()}
    named = dict(worker.backend.model.hf.named_parameters())
    for key, parameter in named.items():
        for field, value in worker.backend.optimizer.state[parameter].items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            state[f"optim.{field}.{key}"] = full.detach().clone()
    state["lr"] = torch.tensor(worker.backend.learning_rate(), dtype=torch.float64)
    return state


def assert_equal_states(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key
