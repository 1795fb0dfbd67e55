"""Compare one process of plain Hugging Face with pipelines of gloo ranks: same microbatches, losses and scores."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from architectures import random_model
from policy_helpers import policy_config
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.checkpoints.model_files import weights_by_name
from nemo_rl.models.huggingface.checkpoint_names import in_checkpoint
from nemo_rl.models.training.inputs import InputLayout, build_training_inputs

CPU = torch.device("cpu")
TOLERANCE = 1e-5
MAX_GRAD_NORM = 0.5
LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Case:
    """A mesh and the work that runs on it.

    Attributes:
        pp: stages.
        dp: data-parallel ranks of each.
        virtual: chunks of each stage.
        packed: rows end to end instead of padded.
        num_microbatches: of each data-parallel rank, every one of another shape.
        values: more of the policy section.
    """

    pp: int = 2
    dp: int = 1
    virtual: int = 1
    packed: bool = False
    num_microbatches: int = 3
    values: tuple[tuple[str, Any], ...] = ()

    def config(self, name: str) -> Any:
        section = {"pipeline_parallel_size": self.pp, "virtual_pipeline_size": self.virtual}
        values = dict(self.values)
        section |= values.pop("dtensor_cfg", {})
        return policy_config(
            name,
            dtensor_cfg=section,
            sequence_packing={"enabled": self.packed},
            max_grad_norm=MAX_GRAD_NORM,
            **{"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": LEARNING_RATE}}, **values},
        )


def save_model(folder: Path, model_type: str, num_layers: int, **overrides: Any) -> str:
    model = random_model(model_type, **{"initializer_range": 0.1, **layers(model_type, num_layers), **overrides})
    model.save_pretrained(folder)
    return str(folder)


def layers(model_type: str, num_layers: int) -> dict[str, Any]:
    """Return overrides that give an architecture this many layers, of both kinds if it has two."""
    kinds = ["sliding_attention", "full_attention"]
    mixed = {"layer_types": [kinds[layer % 2] for layer in range(num_layers)]}
    has_kinds = model_type in ("gemma2", "gemma3_text", "gpt_oss")
    return {"num_hidden_layers": num_layers} | (mixed if has_kinds else {})


def microbatches(dp_rank: int, number: int) -> list[BatchedDataDict[Any]]:
    """Make rows of different lengths, and a different number of rows, for every microbatch."""
    made = []
    for index in range(number):
        gen = torch.Generator().manual_seed(100 * dp_rank + index)
        rows, width = 1 + (index + dp_rank) % 3, 9 + 4 * ((2 * index + dp_rank) % 4)
        lengths = torch.randint(4, width + 1, (rows,), generator=gen)
        real = torch.arange(width)[None] < lengths[:, None]
        made.append(
            BatchedDataDict(
                {
                    "input_ids": torch.randint(3, 97, (rows, width), generator=gen) * real,
                    "input_lengths": lengths,
                    "token_mask": real.float(),
                    "sample_mask": torch.ones(rows),
                    "weights": torch.randn(rows, width - 1, generator=gen),
                }
            )
        )
    return made


def reference(name: str, dp: int, number: int) -> dict[str, Any]:
    """Return loss, gradients, log-probs and one clipped SGD step by the model's own logits, row by row."""
    torch.set_num_threads(1)
    hf = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="eager")
    total, scores = 0.0, {}
    for dp_rank in range(dp):
        for index, rows in enumerate(microbatches(dp_rank, number)):
            out = torch.zeros_like(rows["weights"])
            for row, length in enumerate(rows["input_lengths"].tolist()):
                ids = rows["input_ids"][row : row + 1, :length]
                logp = torch.log_softmax(hf(input_ids=ids, use_cache=False).logits[0, :-1], dim=-1)
                picked = logp.gather(-1, ids[0, 1:, None]).squeeze(-1)
                loss = -(picked * rows["weights"][row, : length - 1]).sum() / 10
                loss.backward()
                total += loss.item()
                out[row, : length - 1] = picked.detach()
            scores[dp_rank, index] = out
    grads = {key: p.grad.clone() for key, p in hf.named_parameters() if p.grad is not None}
    norm = torch.cat([g.double().flatten() for g in grads.values()]).norm().item()
    step = LEARNING_RATE * min(1.0, MAX_GRAD_NORM / norm)
    stepped = {key: value - step * grads[key] if key in grads else value for key, value in weights_by_name(hf).items()}
    saved = dict(in_checkpoint(hf, stepped.items()))
    return {"loss": total, "grads": grads, "scores": scores, "norm": norm, "stepped": saved}


def run_cases(rank: int, world_size: int, names: list[str], case: Case) -> list[dict[str, Any]]:
    """Run `run_case` for several models in the same processes."""
    return [run_case(rank, world_size, name, case) for name in names]


def run_case(rank: int, world_size: int, name: str, case: Case) -> dict[str, Any]:
    """Return the same on one rank of a pipeline, with the gradients before and after clipping, by known names."""
    config = case.config(name)
    layout = ParallelLayout.of(config, world_size)
    backend = DTensorBackend(config, CPU, layout, init_reference_model=False)
    dp_rank = layout.data_parallel_rank(rank)
    rows = microbatches(dp_rank, case.num_microbatches)
    inputs = [build_training_inputs(each, InputLayout(packed=case.packed), CPU) for each in rows]
    losses: list[torch.Tensor] = []
    scores: dict[tuple[int, int], torch.Tensor] = {}
    evaluated: dict[tuple[int, int], torch.Tensor] = {}

    def train_step(index: int, logprobs_K: torch.Tensor, entropy_K: torch.Tensor) -> torch.Tensor:
        scattered = inputs[index].scatter(logprobs_K)
        scores[dp_rank, index] = scattered.detach()
        loss = -(scattered * rows[index]["weights"]).sum() / 10
        losses.append(loss.detach())
        return loss

    def score_step(index: int, logprobs_K: torch.Tensor, entropy_K: torch.Tensor) -> None:
        evaluated[dp_rank, index] = inputs[index].scatter(logprobs_K)

    backend.run(inputs, score_step, backward=False)
    backend.run(inputs, train_step, backward=True)
    grads = _gradients(backend)
    norm, stepped = backend.clip_and_step()
    return {
        "loss": sum(loss.item() for loss in losses),
        "scores": scores,
        "evaluated": evaluated,
        "grads": grads,
        "norm": (norm, stepped),
        "weights": {key: tensor.clone() for key, tensor in backend.iterate_weights()},
        "held": _whole(dict(backend.model.hf.named_parameters())),
    }


def _gradients(backend: DTensorBackend) -> dict[str, torch.Tensor]:
    """Return the gradients after `run`: a tied weight's under its two names, each with its stage's part."""
    named = dict(backend.model.hf.named_parameters())
    return _whole({key: p.grad for key, p in named.items() if p.grad is not None})


def _whole(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for key, value in named.items()
    }


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return `max |a - b| / max |b|`."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
