"""Scores, gradients and updates of models that read images, compared with transformers in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import FAMILIES, ROWS, exact_logprobs, exact_model, make_folder, never_drawn, prompt, tokenizer_of
from policy_helpers import WeightedNLL, policy_config, process_group, run_ranks

from nemo_rl.data.model_rows import completed
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker

pytest.importorskip("torchvision")

CPU = torch.device("cpu")
ANSWER = [70, 71, 72, 73]
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 160, "logprob_mb_tokens": 160}}
FAR = 3e-5


def batch_of(folder: str, names: list[str]) -> BatchedDataDict[Any]:
    """Return rows with four answer tokens each."""
    tokenizer = tokenizer_of(folder)
    prompts = [prompt(ROWS[name], tokenizer) for name in names]
    ids = [torch.tensor([*tokens, *ANSWER]) for tokens, _ in prompts]
    lengths = torch.tensor([len(each) for each in ids])
    width = int(lengths.max())
    mask = torch.arange(width)[None] < lengths[:, None]
    answered = mask & (torch.arange(width)[None] >= lengths[:, None] - len(ANSWER))
    advantages = torch.linspace(-1, 2, len(ids))[:, None].expand(-1, width).contiguous()
    return BatchedDataDict(
        {
            "input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
            "input_lengths": lengths,
            "token_mask": answered.float(),
            "sample_mask": torch.ones(len(ids)),
            "advantages": advantages,
            "row_inputs": completed([inputs for _, inputs in prompts]),
        }
    )


def config_of(folder: str, rows: int, **values: Any) -> Any:
    sizes = {"max_total_sequence_length": 160, "train_global_batch_size": rows}
    return policy_config(folder, tokenizer={"use_processor": True}, **{**sizes, **values})


def exact_scores(folder: str, batch: BatchedDataDict[Any]) -> torch.Tensor:
    model, never = exact_model(folder), ()
    scores = torch.zeros(batch["input_ids"].shape, dtype=torch.float64)
    for row, length in enumerate(batch["input_lengths"].tolist()):
        ids = batch["input_ids"][row, :length].tolist()
        scores[row, 1:length] = exact_logprobs(model, ids, batch["row_inputs"][row], never)
    return scores


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_folder(root / family, family) for family in FAMILIES}


def scored(rank: int, world_size: int, folder: str, names: list[str], values: dict[str, Any]) -> torch.Tensor:
    batch = batch_of(folder, names)
    config = config_of(folder, len(names), **values)
    worker = PolicyWorker(DTensorBackend(config, CPU, init_reference_model=False), config)
    shards = shard_batch(batch, world_size, logprob_strategy(config), shares_prompts=False)
    scores = worker.get_logprobs(shards.data[rank], shards.sizes[rank])
    return shards.restore([scores] * world_size) if world_size == 1 else (shards, rank, scores)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("values", [{}, PACKED], ids=["padded", "packed"])
def test_scores_are_those_of_transformers_in_float64(folders: dict[str, str], family: str, values: Any) -> None:
    names = list(ROWS)
    (scores,) = run_ranks(scored, 1, folders[family], names, values)
    batch = batch_of(folders[family], names)
    real = torch.arange(scores.shape[1])[None] < batch["input_lengths"][:, None]
    worst = ((scores.double() - exact_scores(folders[family], batch)).abs() * real).max().item()
    print(family, values, worst)
    assert worst < FAR
