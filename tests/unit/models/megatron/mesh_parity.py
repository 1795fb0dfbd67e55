"""Run one optimization of a small model by Hugging Face and torch, and the same one by this backend's parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from policy_helpers import random_batch
from rank_backend import CPU, backend_of, policy_of
from small_models import VOCAB, hf_model
from torch import Tensor
from witness import difference, global_tensors, largest_difference, largest_gradient_difference

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.training.inputs import InputLayout, build_training_inputs

ROWS, STEPS, LR, DECAY, CLIP, EPS = 8, 4, 1e-3, 0.1, 1.0, 1e-5
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("qwen2", {}),
    "moe": ("qwen3_moe", {"mlp_only_layers": []}),
}


@dataclass
class Reference:
    """Results of Hugging Face and torch: models before and after all steps, and gradients of the first step."""

    before: Any
    after: Any
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    logprobs: Tensor = field(default_factory=lambda: torch.empty(0))


def model(kind: str) -> Any:
    """Make a model of four layers: one of `MODELS`, or of the families that `small_models` knows."""
    name, fields = MODELS.get(kind, (kind, {}))
    made = hf_model(name, num_hidden_layers=4, **fields)
    made.set_experts_implementation("eager")
    return made


def batch(step: int) -> BatchedDataDict[Any]:
    data = random_batch(ROWS, 21, seed=step)
    data["input_ids"] = data["input_ids"].clamp(max=VOCAB - 1)
    return data


def loss_of(logprobs: Tensor, entropy: Tensor, rows: BatchedDataDict[Any], count: float) -> Tensor:
    """Return the part of the loss for rows with scores `[b, T - 1]`."""
    mask = rows["token_mask"][:, 1:] * rows["sample_mask"][:, None]
    return (-(logprobs * rows["advantages"][:, 1:]) - 0.1 * entropy).mul(mask).sum() / count


def count_of(data: BatchedDataDict[Any]) -> float:
    return float((data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum())


def adam_of(named: dict[str, Any]) -> torch.optim.AdamW:
    """Make AdamW for named parameters, without weight decay of vectors."""
    is_vector = {name: p.dim() == 1 or name.endswith("_bias") for name, p in named.items()}  # stacked experts'
    vectors, matrices = ([p for name, p in named.items() if is_vector[name] is kind] for kind in (True, False))
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}]
    return torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY, eps=EPS)


def reference(
    kind: str, dtype: torch.dtype = torch.float64, make: Callable[[dict[str, Any]], Any] = adam_of
) -> Reference:
    """Run four steps in float64, with the optimizer that `make` builds for the named parameters."""
    hf = model(kind).to(dtype)
    kept = Reference(before=model(kind), after=hf)
    optimizer = make(dict(hf.named_parameters()))
    for step in range(STEPS):
        data = batch(step)
        logprobs, entropy = _scores(hf, data)
        loss = loss_of(logprobs, entropy, data, count_of(data))
        loss.backward()
        if step == 0:
            kept.logprobs = logprobs.detach()
            kept.gradients = {name: p.grad.clone() for name, p in hf.named_parameters() if p.grad is not None}
        kept.losses.append(loss.item())
        kept.norms.append(float(torch.nn.utils.clip_grad_norm_(hf.parameters(), CLIP)))
        optimizer.step()
        hf.zero_grad()
    return kept


def rounding(kind: str, expected: Reference) -> dict[str, float]:
    """Return the largest relative differences of Hugging Face's own float32 model, without a mesh; see `run_case`."""
    found = reference(kind, torch.float32)
    after = dict(expected.after.state_dict())
    pairs = {
        "loss": [(torch.tensor(a), torch.tensor(b)) for a, b in zip(found.losses, expected.losses, strict=True)],
        "norm": [(torch.tensor(a), torch.tensor(b)) for a, b in zip(found.norms, expected.norms, strict=True)],
        "logprobs": [(found.logprobs, expected.logprobs)],
        "gradients": [(found.gradients[name], gradient) for name, gradient in expected.gradients.items()],
        "weights": [(tensor, after[name]) for name, tensor in found.after.state_dict().items()],
    }
    return {what: max(difference(a.double(), b.double()) for a, b in both) for what, both in pairs.items()}


def _scores(hf: Any, data: BatchedDataDict[Any]) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies `[b, T - 1]`, one unpadded row at a time; 0 on padding."""
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


class Trainer:
    """The backend on one mesh, with the weights of a Hugging Face model, and this rank's rows of a batch.

    Args:
        hf: the model.
        values: of the section, see `rank_backend.policy_of`.
    """

    def __init__(self, hf: Any, values: dict[str, Any]) -> None:
        self.backend = backend_of(hf, **values)
        self.layout = ParallelLayout.of(policy_of(**values), dist.get_world_size())
        share = ROWS // self.layout.data_parallel_size
        self.first = self.layout.data_parallel_rank(dist.get_rank()) * share
        sizes = [1, share - 1] if share < ROWS else [3, 1, 4]
        self.bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]

    def train(self, data: BatchedDataDict[Any], packed: bool) -> tuple[float, list[Tensor]]:
        """Run one training pass; return the loss of all ranks, and log-probs `[b, T - 1]` of its own microbatches."""
        places = [slice(self.first + a, self.first + b) for a, b in pairwise(self.bounds)]
        rows = [data.slice(place.start, place.stop) for place in places]
        inputs = [build_training_inputs(part, InputLayout(packed), CPU) for part in rows]
        count, losses, scored = count_of(data), [], []

        def forward_step(index: int, logprobs_K: Tensor, entropy_K: Tensor) -> Tensor:
            logprobs, entropy = inputs[index].scatter(logprobs_K), inputs[index].scatter(entropy_K)
            loss = loss_of(logprobs, entropy, rows[index], count)
            losses.append(loss.item())
            scored.append(logprobs.detach())
            return loss

        self.backend.run(inputs, forward_step, backward=True)
        is_result = dist.get_rank() in self.layout.result_ranks
        total = torch.tensor(sum(losses) if is_result else 0.0, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item(), scored

    def logprob_error(self, data: BatchedDataDict[Any], scored: list[Tensor], expected: Tensor) -> float:
        """Return the largest difference of unmasked log-probs, relative to the largest; 0 if this stage has none."""
        if not scored:
            return 0.0
        mine = slice(self.first, self.first + self.bounds[-1])
        mask = (data["token_mask"][:, 1:] * data["sample_mask"][:, None])[mine]
        return (((torch.cat(scored) - expected[mine]) * mask).abs().max() / expected.abs().max()).item()


def run_case(kind: str, packed: bool, values: dict[str, Any], expected: Reference) -> dict[str, float]:
    """Return the largest relative differences of one mesh from the reference, on this rank; see `difference`."""
    trainer = Trainer(expected.before, values)
    backend, found = trainer.backend, {"loss": 0.0, "norm": 0.0}
    gradients = global_tensors(expected.before.config, dict(expected.gradients))
    for step in range(STEPS):
        loss, scored = trainer.train(batch(step), packed)
        found["loss"] = max(found["loss"], abs(loss / expected.losses[step] - 1))
        if step == 0:
            found["logprobs"] = trainer.logprob_error(batch(step), scored, expected.logprobs)
            if not backend.chunks[0].ddp_config.use_distributed_optimizer:  # each rank there sums only a part
                found["gradients"], _ = largest_gradient_difference(backend.chunks, gradients)
        backend.update_metrics()
        norm, stepped = backend.clip_and_step()
        assert stepped
        found["norm"] = max(found["norm"], abs(norm / expected.norms[step] - 1))
    assert sum(1 for _ in backend.iterate_weights()) > 10  # which completes the weights
    found["weights"] = largest_difference(backend.chunks, expected.after)
    return found


def worst(of_ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: max(one[name] for one in of_ranks) for name in of_ranks[0]}


def of_one_and_two_ranks(host: Any, on_rank: Any, references: Any) -> dict[str, dict[str, float]]:
    """Return the largest differences of each case over the ranks of its world.

    Args:
        host: runs the ranks.
        on_rank: returns the differences of the cases of a world; called with `(rank, world, references)`.
        references: what the cases are compared with.
    """
    found: dict[str, dict[str, float]] = {}
    for world in (1, 2):
        ranks = host.run(on_rank, world, references)
        found |= {name: worst([rank[name] for rank in ranks]) for name in ranks[0]}
    return found
