"""One optimizer run of a small model by Hugging Face and torch, and the same one by this backend's parts."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from architectures import random_model
from policy_helpers import random_batch
from section import megatron_section
from torch import Tensor

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.parallel_logprobs import SamplingDensity
from nemo_rl.models.inputs import InputLayout, build_training_inputs

VOCAB, ROWS, STEPS, LR, DECAY, CLIP, EPS = 96, 8, 4, 1e-3, 0.1, 1.0, 1e-6
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": False}),
    "moe": ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 1}),
}


@dataclass
class Reference:
    """What Hugging Face and torch give: models before, with gradients of the first step, and after all steps."""

    before: Any
    after: Any
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    logprobs: Tensor = field(default_factory=lambda: torch.empty(0))


def model(kind: str) -> Any:
    name, fields = MODELS[kind]
    made = random_model(name, **{"vocab_size": VOCAB, "num_hidden_layers": 4, "initializer_range": 0.1, **fields})
    made.set_attn_implementation("eager")
    made.set_experts_implementation("eager")
    return made


def batch(step: int) -> BatchedDataDict[Any]:
    data = random_batch(ROWS, 21, seed=step)
    data["input_ids"] = data["input_ids"].clamp(max=VOCAB - 1)
    return data


def loss_of(logprobs: Tensor, entropy: Tensor, rows: BatchedDataDict[Any], count: float) -> Tensor:
    """`[b, T - 1]` scores of rows to their part of the loss."""
    mask = rows["token_mask"][:, 1:] * rows["sample_mask"][:, None]
    return (-(logprobs * rows["advantages"][:, 1:]) - 0.1 * entropy).mul(mask).sum() / count


def count_of(data: BatchedDataDict[Any]) -> float:
    return float((data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum())


def reference(kind: str, dtype: torch.dtype = torch.float64) -> Reference:
    """Four steps in float64."""
    hf = model(kind).to(dtype)
    kept = Reference(before=model(kind), after=hf)
    vectors = [p for p in hf.parameters() if p.dim() == 1]
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": [p for p in hf.parameters() if p.dim() > 1]}]
    adam = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY, eps=EPS)
    for step in range(STEPS):
        data = batch(step)
        logprobs, entropy = _scores(hf, data)
        loss = loss_of(logprobs, entropy, data, count_of(data))
        loss.backward()
        if step == 0:
            kept.logprobs = logprobs.detach()
            for ours, theirs in zip(kept.before.parameters(), hf.parameters(), strict=True):
                ours.grad = None if theirs.grad is None else theirs.grad.to(ours.dtype)
        kept.losses.append(loss.item())
        kept.norms.append(float(torch.nn.utils.clip_grad_norm_(hf.parameters(), CLIP)))
        adam.step()
        adam.zero_grad()
    return kept


def _scores(hf: Any, data: BatchedDataDict[Any]) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies `[b, T - 1]`, one row at a time and unpadded; 0 on padding."""
    shape = (len(data["input_ids"]), data["input_ids"].shape[1] - 1)
    logprobs, entropy = (torch.zeros(shape, dtype=hf.dtype) for _ in range(2))
    rows = []
    for row, length in enumerate(data["input_lengths"].tolist()):
        ids = data["input_ids"][row : row + 1, :length]
        log_p = hf(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        pad = (0, shape[1] - length + 1)
        taken = torch.nn.functional.pad(log_p.gather(-1, ids[0, 1:, None])[:, 0], pad)
        rows.append((taken, torch.nn.functional.pad(-(log_p.exp() * log_p).sum(-1), pad)))
    logprobs, entropy = (torch.stack(part) for part in zip(*rows, strict=True))
    return logprobs, entropy


def layout_of(section: Any) -> ParallelLayout:
    sizes = {
        "pp": section.pipeline_model_parallel_size,
        "cp": section.context_parallel_size,
        "tp": section.tensor_model_parallel_size,
    }
    dp = dist.get_world_size() // (sizes["pp"] * sizes["cp"] * sizes["tp"])
    return ParallelLayout(dp_shard=dp, ep=section.expert_model_parallel_size, **sizes)


def run_case(rank: int, kind: str, packed: bool, values: dict[str, Any], expected: Reference) -> dict[str, float]:
    """Largest differences of one mesh from the reference, on this rank."""
    from sketch_model import build_chunks, largest_difference, largest_gradient_difference, load_weights

    from nemo_rl.models.megatron import optimizer as optim
    from nemo_rl.models.megatron.inputs import Division, rank_inputs
    from nemo_rl.models.megatron.parallel import start_model_parallel, stop_model_parallel
    from nemo_rl.models.megatron.schedule import Schedule, prepare
    from nemo_rl.models.megatron.scoring import Scoring

    section = megatron_section(**values)
    layout = layout_of(section)
    groups = start_model_parallel(layout, section, torch.device("cpu"))
    chunks: list[Any] = build_chunks(expected.before.config, section, precision=torch.float32, device=torch.device("cpu"))
    load_weights(chunks, expected.before)
    prepare(chunks)
    chunks = list(optim.with_gradients(chunks, section))
    optimizer = optim.build_optimizer(chunks, section, precision=torch.float32)
    optim.build_scheduler(optimizer, section)
    schedule = Schedule(chunks, Scoring(groups, SamplingDensity()), lambda inputs: nullcontext())
    division = Division(
        layout.cp,
        0 if groups.cp is None else groups.cp.rank(),
        layout.tp if groups.sequence_parallel else 1,
        groups.tp.rank() if groups.sequence_parallel and groups.tp is not None else 0,
    )
    share = ROWS // layout.data_parallel_size
    first = layout.data_parallel_rank(rank) * share
    is_result = rank in layout.result_ranks
    found = {"loss": 0.0, "norm": 0.0, "logprobs": 0.0, "gradients": 0.0}
    for step in range(STEPS):
        data = batch(step)
        count = count_of(data)
        mine = data.slice(first, first + share)
        sizes = [1, share - 1] if share < 8 else [3, 1, 4]
        bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        rows = [mine.slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
        inputs = [build_training_inputs(part, InputLayout(packed), torch.device("cpu")) for part in rows]
        losses: list[float] = []

        def forward_step(index: int, logprobs_K: Tensor, entropy_K: Tensor) -> Tensor:
            scattered = inputs[index].scatter(logprobs_K)
            loss = loss_of(scattered, inputs[index].scatter(entropy_K), rows[index], count)
            losses.append(loss.item())
            if step == 0:
                begin = first + bounds[index]
                theirs = expected.logprobs[begin : begin + len(scattered)]
                mask = rows[index]["token_mask"][:, 1:] * rows[index]["sample_mask"][:, None]
                error = ((scattered.detach() - theirs) * mask).abs().max().item()
                found["logprobs"] = max(found["logprobs"], error)
            return loss

        schedule.run([rank_inputs(one, division) for one in inputs], forward_step, backward=True)
        assert not is_result or len(losses) == len(inputs)
        total = torch.tensor(sum(losses) if is_result else 0.0, dtype=torch.float64)
        dist.all_reduce(total)
        found["loss"] = max(found["loss"], abs(total.item() - expected.losses[step]))
        if step == 0 and not section.optimizer.use_distributed_optimizer:
            found["gradients"] = largest_gradient_difference(chunks, expected.before)
        norm, stepped = optim.clip_and_step(optimizer, chunks)
        assert stepped
        found["norm"] = max(found["norm"], abs(norm / expected.norms[step] - 1))
    optim.complete_weights(chunks)
    found["weights"] = largest_difference(chunks, expected.after)
    stop_model_parallel()
    return found


def worst(of_ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: max(one[name] for one in of_ranks) for name in of_ranks[0]}


os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
