"""One optimizer run of a small model by Hugging Face and torch, and the same one by this backend's parts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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

VOCAB, ROWS, STEPS, LR, DECAY, CLIP, EPS = 96, 8, 4, 1e-3, 0.1, 1.0, 1e-5
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


class Trainer:
    """This backend's parts on one mesh, with the weights of a Hugging Face model.

    Args:
        hf: the model.
        values: keys of `policy.megatron_cfg`.
        bias_update_rate: see `schedule.prepare`.
    """

    def __init__(self, hf: Any, values: dict[str, Any], bias_update_rate: float = 0.0) -> None:
        from sketch_model import build_chunks, load_weights

        from nemo_rl.models.megatron import optimizer as optim
        from nemo_rl.models.megatron.expert_load import ExpertLoad
        from nemo_rl.models.megatron.parallel import division_of, start_model_parallel
        from nemo_rl.models.megatron.schedule import Schedule, prepare
        from nemo_rl.models.megatron.scoring import Scoring

        section, device = megatron_section(**values), torch.device("cpu")
        self.layout, self.optim = layout_of(section), optim
        groups = start_model_parallel(self.layout, section, device)
        bare = build_chunks(hf.config, section, precision=torch.float32, device=device)
        load_weights(bare, hf)
        prepare(bare, bias_update_rate=bias_update_rate)
        self.chunks = list(optim.with_gradients(bare, section))
        self.optimizer = optim.build_optimizer(self.chunks, section, precision=torch.float32)
        optim.build_scheduler(self.optimizer, section)
        self.division = division_of(groups)
        self.load = ExpertLoad(self.chunks, self.division, device)
        self.schedule = Schedule(self.chunks, Scoring(groups, SamplingDensity()), self.division, self.load.watching)
        share = ROWS // self.layout.data_parallel_size
        self.first = self.layout.data_parallel_rank(dist.get_rank()) * share
        sizes = [1, share - 1] if share < ROWS else [3, 1, 4]
        self.bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]

    def train(self, data: BatchedDataDict[Any], packed: bool) -> tuple[float, list[Tensor]]:
        """One training pass: the loss of all ranks, and log-probs `[b, T - 1]` of this rank's microbatches."""
        from nemo_rl.models.megatron.inputs import rank_inputs

        places = [slice(self.first + a, self.first + b) for a, b in pairwise(self.bounds)]
        rows = [data.slice(place.start, place.stop) for place in places]
        inputs = [build_training_inputs(part, InputLayout(packed), torch.device("cpu")) for part in rows]
        count, losses, scored = count_of(data), [], []

        def forward_step(index: int, logprobs_K: Tensor, entropy_K: Tensor) -> Tensor:
            logprobs, entropy = inputs[index].scatter(logprobs_K), inputs[index].scatter(entropy_K)
            loss = loss_of(logprobs, entropy, rows[index], count)
            losses.append(loss.item())
            scored.append(logprobs.detach())
            return loss

        self.schedule.run([rank_inputs(one, self.division) for one in inputs], forward_step, backward=True)
        is_result = dist.get_rank() in self.layout.result_ranks
        total = torch.tensor(sum(losses) if is_result else 0.0, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item(), scored

    def logprob_error(self, data: BatchedDataDict[Any], scored: list[Tensor], expected: Tensor) -> float:
        """Largest difference of log-probs that the loss counts; 0 where this stage has none."""
        if not scored:
            return 0.0
        mine = slice(self.first, self.first + self.bounds[-1])
        mask = (data["token_mask"][:, 1:] * data["sample_mask"][:, None])[mine]
        return ((torch.cat(scored) - expected[mine]) * mask).abs().max().item()


def run_case(kind: str, packed: bool, values: dict[str, Any], expected: Reference) -> dict[str, float]:
    """Largest differences of one mesh from the reference, on this rank."""
    from sketch_model import largest_difference, largest_gradient_difference

    from nemo_rl.models.megatron.parallel import stop_model_parallel

    trainer = Trainer(expected.before, values)
    found = {"loss": 0.0, "norm": 0.0}
    for step in range(STEPS):
        loss, scored = trainer.train(batch(step), packed)
        found["loss"] = max(found["loss"], abs(loss - expected.losses[step]))
        if step == 0:
            found["logprobs"] = trainer.logprob_error(batch(step), scored, expected.logprobs)
            if not trainer.chunks[0].ddp_config.use_distributed_optimizer:  # there each rank sums a part only
                found["gradients"] = largest_gradient_difference(trainer.chunks, expected.before)
        trainer.load.end_update()
        norm, stepped = trainer.optim.clip_and_step(trainer.optimizer, trainer.chunks)
        assert stepped
        found["norm"] = max(found["norm"], abs(norm / expected.norms[step] - 1))
    trainer.optim.complete_weights(trainer.chunks)
    found["weights"] = largest_difference(trainer.chunks, expected.after)
    stop_model_parallel()
    return found


def worst(of_ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: max(one[name] for one in of_ranks) for name in of_ranks[0]}
