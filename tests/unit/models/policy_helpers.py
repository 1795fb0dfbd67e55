"""Tiny models, batches and process groups for the tests of the policy."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parity.ranks import on_ranks
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.losses.loss_function import LossInputType, LossType

VOCAB = 97
ARCHITECTURES = ("qwen2", "qwen3", "llama", "gemma3")
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # large weights, so that a token seen wrongly shows in the numbers
}


def tiny_model(arch: str, tie: bool = False, **overrides: Any) -> PreTrainedModel:
    torch.manual_seed(7)
    values = {**COMMON, "tie_word_embeddings": tie, **overrides}
    if arch == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**values))
    if arch == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(head_dim=16, **values))
    if arch == "llama":
        return LlamaForCausalLM(LlamaConfig(**values))
    assert arch == "gemma3"
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    gemma = {"head_dim": 16, "query_pre_attn_scalar": 16, "initializer_range": 0.1}
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**values, **layers, **gemma, **overrides}))


def save_tiny_model(folder: Path, arch: str = "qwen2", **kwargs: Any) -> str:
    tiny_model(arch, **kwargs).save_pretrained(folder)
    return str(folder)


def random_batch(rows: int = 6, width: int = 24, seed: int = 0) -> BatchedDataDict[Any]:
    """Make right-padded rows of different lengths, one of them masked, with made-up advantages."""
    gen = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, width + 1, (rows,), generator=gen)
    lengths[0] = width
    real = torch.arange(width)[None] < lengths[:, None]
    prompt = torch.arange(width)[None] < torch.randint(1, 4, (rows, 1), generator=gen)
    sample_mask = torch.ones(rows)
    sample_mask[1 % rows] = 0.0 if rows > 2 else 1.0
    return BatchedDataDict(
        {
            "input_ids": torch.randint(3, VOCAB, (rows, width), generator=gen) * real,
            "input_lengths": lengths,
            "token_mask": (real & ~prompt).float(),
            "sample_mask": sample_mask,
            "advantages": torch.randn(rows, 1, generator=gen).expand(rows, width).contiguous(),
        }
    )


class WeightedNLL:
    """A user's own loss: advantage-weighted negative log-likelihood, token level."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    needs_reference = False

    def __call__(self, logprobs, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        loss = -(logprobs * mask * data["advantages"][:, 1:]).sum() / global_valid_toks
        worst = torch.where(mask > 0, logprobs.detach(), 0.0)
        return loss, {"nll": -(logprobs.detach() * mask).sum() / global_valid_toks, "lp_min": worst.min()}


def policy_config(model_name: str, **values: Any) -> PolicyConfig:
    defaults: dict[str, Any] = {
        "model_name": model_name,
        "precision": "float32",
        "max_total_sequence_length": 64,
        "train_global_batch_size": 6,
        "train_micro_batch_size": 2,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2, "weight_decay": 0.01}},
        "generation": None,
        "sequence_packing": {"enabled": False},
        "max_grad_norm": None,
    }
    return PolicyConfig.build(**{**defaults, **values})


def hf_logprobs(model: PreTrainedModel, data: BatchedDataDict[Any]) -> torch.Tensor:
    """Return `[B, T]` by the model's own logits, one unpadded row at a time, in float64 log_softmax."""
    out = torch.zeros(data["input_ids"].shape, dtype=torch.float64)
    for row, length in enumerate(data["input_lengths"].tolist()):
        ids = data["input_ids"][row : row + 1, :length]
        logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits.double(), dim=-1)
        out[row, 1:length] = logp[0, :-1].gather(-1, ids[0, 1:, None]).squeeze(-1)
    return out


def hf_logprobs_with_grad(model: PreTrainedModel, data: BatchedDataDict[Any]) -> torch.Tensor:
    """Return the scores of `hf_logprobs` with their graph."""
    rows = []
    for row, length in enumerate(data["input_lengths"].tolist()):
        ids = data["input_ids"][row : row + 1, :length]
        logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits.double(), dim=-1)
        scores = logp[0, :-1].gather(-1, ids[0, 1:, None]).squeeze(-1)
        rows.append(torch.nn.functional.pad(scores, (1, data["input_ids"].shape[1] - length)))
    return torch.stack(rows)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def process_group(rank: int = 0, world_size: int = 1, port: int | None = None) -> Iterator[None]:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    address = f"tcp://127.0.0.1:{port or free_port()}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run `fn(rank, world_size, *args)` in forked processes with a gloo group; return the results by rank."""
    return on_ranks(_with_place, world_size, fn, *args)


def _with_place(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(dist.get_rank(), dist.get_world_size(), *args)
