"""Helpers of the tests of adapters: an adapter with large values, rows, and the PEFT library as their reference."""

from pathlib import Path
from typing import Any

import peft
import torch
from policy_helpers import VOCAB, policy_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.adapters.tensors import AdapterShape
from nemo_rl.models.dtensor.backend import SlotBackend
from nemo_rl.models.policy.adapter_policy import joined_rows, padded_rows
from nemo_rl.models.policy.batching import shard_batch, training_strategy
from nemo_rl.models.policy.workers.adapter_rank import AdapterWorker, NamedLoss, Refusal

SHAPE = AdapterShape(rank=4, alpha=8.0, seed=3)
CROSS_ENTROPY = NamedLoss("cross_entropy")


def make_worker(name: str, **values: Any) -> AdapterWorker:
    config = policy_config(name, **{"optimizer": None, **values})
    return AdapterWorker(SlotBackend(config, torch.device("cpu")), config)


def randomize(worker: AdapterWorker, name: str, seed: int = 0) -> None:
    """Fill an adapter's matrices, of which B is 0 at first, with values that change all outputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in worker._trained[name].tensors.parameters().values():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.2)


def given_rows(lengths: tuple[int, ...] = (9, 5, 12), k: int = 1, seed: int = 0) -> BatchedDataDict[Any]:
    """Make rows with targets that are not their next tokens, and weights of any sign."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]
    targets = [torch.randint(0, VOCAB, (length, k), generator=generator) for length in lengths]
    weights = [torch.randn(length, k, generator=generator) for length in lengths]
    return padded_rows(ids, targets, [{"weights": value} for value in weights])


def run(
    worker: AdapterWorker,
    name: str,
    rows: BatchedDataDict[Any],
    loss: NamedLoss = CROSS_ENTROPY,
    *,
    backward: bool = True,
    place: tuple[int, int] = (0, 1),
    **values: Any,
) -> tuple[float, Tensor]:
    """Run a pass of one rank of several, and return its loss and all of its log-probabilities."""
    rank, num_ranks = place
    sharded = shard_batch(joined_rows([rows]), num_ranks, training_strategy(policy_config("m", **values)))
    part = worker.run_passes(sharded.data[rank], sharded.sizes[rank], [name], loss, backward)
    (total,) = part.losses
    assert not isinstance(total, Refusal), total
    if num_ranks > 1:
        return total, part.logprobs
    return total, sharded.restore([part.logprobs])


def peft_model(base: str, folder: Path) -> Any:
    """Load a base with an adapter through PEFT, in float64."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    adapted = peft.PeftModel.from_pretrained(model, folder, is_trainable=True)
    return adapted.double()


def peft_logprobs(model: Any, rows: BatchedDataDict[Any]) -> list[Tensor]:
    """Return `[N, K]` of each row, read alone and without padding."""
    found = []
    for ids, length, targets in zip(
        rows["input_ids"], rows["input_lengths"].tolist(), rows["target_tokens"], strict=True
    ):
        logits = model(input_ids=ids[None, :length], use_cache=False).logits[0]
        found.append(logits.log_softmax(-1).gather(-1, targets[:length]))
    return found
