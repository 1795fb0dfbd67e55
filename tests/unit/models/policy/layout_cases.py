"""Train one update in every layout of microbatches, and compare it with an update by Hugging Face alone."""

import pytest
import torch
from policy_helpers import policy_config, process_group, random_batch

from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker

CPU = torch.device("cpu")
LAYOUTS = {
    "one_by_one": {"train_micro_batch_size": 1, "logprob_batch_size": 1},
    "padded": {"train_micro_batch_size": 2, "logprob_batch_size": 3},
    "rounded": {"train_micro_batch_size": 4, "make_sequence_length_divisible_by": 16},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 70, "logprob_mb_tokens": 64}},
    "dynamic": {
        "dynamic_batching": {
            "enabled": True,
            "train_mb_tokens": 96,
            "logprob_mb_tokens": 64,
            "sequence_length_round": 4,
        }
    },
}


def pairs_batch():
    data = random_batch(rows=8, width=24, seed=5)
    data["sample_mask"] = torch.tensor([1.0, 1, 1, 1, 0, 0, 1, 1])
    data["reference_policy_logprobs"] = -torch.rand(8, 24, generator=torch.Generator().manual_seed(1))
    data["desirable"] = torch.tensor([1.0, 0, 0, 1, 1, 0, 1, 1])
    data["kl_baseline"], data["num_desirable"] = torch.full((8,), 0.7), torch.full((8,), 4.0)
    return data


def train_once(config, loss_fn, data):
    """Return loss, metrics and gradients of one update of one rank."""
    with process_group():
        worker = PolicyWorker(DTensorBackend(config, CPU, init_reference_model=False), config)
        group = loss_fn.rows_per_unit
        batch = shard_batch(data, 1, training_strategy(config, None, group), group)
        grads = {}

        def keep():
            for name, parameter in worker.backend.model.hf.named_parameters():
                grads[name] = parameter.grad.clone()
            return 0.0, True

        worker.backend.clip_and_step = keep
        result = worker.train(batch.data[0], batch.sizes[0], loss_fn, count_valid(data))
    return result, grads


def expected_gradients(model, loss_fn, data, output):
    seqs, toks = count_valid(data)
    loss, metrics = loss_fn(output, data=data, global_valid_seqs=seqs, global_valid_toks=toks)
    loss.backward()
    return loss.item(), metrics, {name: p.grad for name, p in model.named_parameters()}


def compare(config_values, name, loss_fn, data, expected):
    want_loss, want_metrics, want_grads = expected
    for layout, values in LAYOUTS.items():
        result, grads = train_once(policy_config(name, **config_values, **values), loss_fn, data)
        assert result.loss == pytest.approx(want_loss, abs=2e-5), layout
        for metric, value in want_metrics.items():
            assert result.metrics[metric] == pytest.approx(float(value), abs=1e-4), (layout, metric)
        assert set(grads) == {key for key, grad in want_grads.items() if grad is not None}
        for key, grad in grads.items():
            scale = want_grads[key].abs().max().item()
            error = (grad.double() - want_grads[key]).abs().max().item()
            assert error <= 3e-4 * max(scale, 1e-3), (layout, key, error, scale)
