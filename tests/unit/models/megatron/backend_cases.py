"""Compare `MegatronBackend` on two ranks with Hugging Face; run in forked ranks."""

from dataclasses import replace
from typing import Any

import mesh_parity
import torch
import torch.distributed as dist
from rank_backend import CPU, backend_of, shared_files
from safetensors.torch import load_file
from small_models import hf_model
from torch import Tensor
from witness import difference, global_tensors, largest_gradient_difference

from nemo_rl.distributed.parallel_logprobs import TopK
from nemo_rl.host.threads import on_threads
from nemo_rl.models.huggingface.layers import recorded_outputs
from nemo_rl.models.megatron import parallel
from nemo_rl.models.training.inputs import (
    InputLayout,
    ModelInputs,
    all_targets,
    build_model_inputs,
    build_score_inputs,
    build_topk_inputs,
    build_training_inputs,
)

TEMPERATURE = {"temperature": 0.7}


def scored(backend: Any, inputs: ModelInputs) -> tuple[Tensor, Tensor] | None:
    """Return the backend's result for one microbatch; None in a stage that has no scores."""
    given: list[tuple[Tensor, Tensor]] = []
    backend.run([inputs], lambda index, first, second: given.append((first, second)), backward=False)
    return given[0] if given else None


def answers(hf: Any, values: dict[str, Any], packed: bool) -> dict[str, Any]:
    """Return differences from Hugging Face in everything that scores, and facts about weights and layers."""
    backend = backend_of(hf, **values, generation=TEMPERATURE, init_reference_model=True)
    data, layout = mesh_parity.batch(0), InputLayout(packed)
    found: dict[str, Any] = {}
    with shared_files(hf) as folder:
        files = load_file(folder / "model.safetensors")
    sent = {name: tensor.clone() for name, tensor in backend.iterate_weights()}
    found["sent"] = float(sent.keys() != files.keys() or any(not torch.equal(sent[n], files[n]) for n in files))
    inputs = build_model_inputs(data, all_targets(data), layout, CPU)
    with torch.no_grad():
        logits = torch.stack([hf(input_ids=ids[None], use_cache=False).logits[0] for ids in data["input_ids"]])
    top = build_topk_inputs(data, TopK(5), layout, CPU)
    for name, asked in {"temperature": inputs, "unfiltered": replace(inputs, unfiltered=True)}.items():
        log_p = (logits[:, :-1] / 0.7).log_softmax(-1).flatten(0, 1)[inputs.places_K]
        got = scored(backend, asked)
        if got is not None:
            found[name] = (got[0] - log_p.gather(-1, inputs.targets_K[:, None])[:, 0]).abs().max().item()
            found[name + " entropy"] = (got[1] + (log_p.exp() * log_p).sum(-1)).abs().max().item()
    got = scored(backend, top)
    if got is not None:
        values_Kk, ids_Kk = logits.flatten(0, 1)[top.places_K].topk(5, dim=-1)
        found["top logits"] = (got[0] - values_Kk).abs().max().item()
        found["top ids"] = float((got[1] != ids_Kk).sum())
    found["layers"] = layer_error(backend, hf)
    found["reference"] = reference_error(backend, data, layout)
    return found


def layer_error(backend: Any, hf: Any) -> float:
    """Return the largest difference of the layers' outputs for one row, relative to their largest value."""
    data = mesh_parity.batch(0).slice(0, 1)
    layers = backend.decoder_layers()
    with recorded_outputs(list(layers.values())) as outputs:
        scored(backend, build_model_inputs(data, all_targets(data), InputLayout(True), CPU))
    ids = data["input_ids"]
    theirs = {f"model.layers.{number}": layer for number, layer in enumerate(hf.model.layers)}
    with recorded_outputs([theirs[name] for name in layers]) as expected, torch.no_grad():
        hf(input_ids=ids, use_cache=False)
    joined = [backend.join_tokens(output)[: ids.shape[1]] for output in outputs]
    return max(difference(ours, theirs) for ours, theirs in zip(joined, expected, strict=True))


def reference_error(backend: Any, data: Any, layout: InputLayout) -> dict[str, bool]:
    """Return whether the first weights and then the current ones come back bit for bit, after an update."""
    inputs = build_training_inputs(data, layout, CPU)

    def step(index: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
        return -logprobs.sum() / 100

    initial = weights(backend)
    before = scored(backend, inputs)
    backend.run([inputs], step, backward=True)
    assert backend.clip_and_step()[1]
    current = weights(backend)
    after = scored(backend, inputs)
    with backend.reference_weights():
        within, again = weights(backend), scored(backend, inputs)
    returned, last = weights(backend), scored(backend, inputs)
    same = {name: torch.equal(initial[name], within[name]) for name in initial}
    return {
        "moved": any(not torch.equal(initial[name], current[name]) for name in initial),
        "initial": all(same.values()) and (before is None or torch.equal(before[0], again[0])),
        "current": all(torch.equal(current[name], returned[name]) for name in current)
        and (after is None or torch.equal(after[0], last[0])),
    }


def weights(backend: Any) -> dict[str, Tensor]:
    backend._optim.complete_weights(backend.chunks)
    return {name: tensor.clone() for name, tensor in backend._weights().items()}


def reward_error(values: dict[str, Any], packed: bool) -> dict[str, float]:
    """Compare scores of a reward model and its gradients with Hugging Face's sequence classifier."""
    hf = hf_model("llama", scores=True, num_hidden_layers=4)
    backend = backend_of(hf, **values, reward_model_cfg={"enabled": True})
    data = mesh_parity.batch(0)
    last = data["input_lengths"] - 1
    body = [
        hf.model(ids[None, : end + 1], use_cache=False).last_hidden_state[0, -1]
        for ids, end in zip(data["input_ids"], last, strict=True)
    ]
    expected = hf.score(torch.stack(body))[:, 0]
    (expected.square().sum() / 8).backward()
    share = len(data["input_ids"]) // backend._schedule._groups.dp.size()
    rank = backend._schedule._groups.dp.rank()
    mine = slice(rank * share, (rank + 1) * share)
    found: dict[str, float] = {"scores": 0.0}

    def step(index: int, scores: Tensor, zeros: Tensor) -> Tensor:
        found["scores"] = (scores - expected[mine]).abs().max().item()
        assert scores.shape == zeros.shape and not zeros.any()
        return scores.square().sum() / 8

    backend.run([build_score_inputs(data.slice(mine.start, mine.stop), InputLayout(packed), CPU)], step, backward=True)
    gradients = {name: parameter.grad for name, parameter in hf.named_parameters()}
    found["gradients"], _ = largest_gradient_difference(backend.chunks, global_tensors(hf.config, gradients))
    return found


def load_of_experts(hf: Any, values: dict[str, Any], packed: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Return the backend's metrics of an update, and those of the choices that Hugging Face's routers make."""
    from nemo_rl.models.expert_routing import load_metrics

    counts = [torch.zeros(4, dtype=torch.int64) for _ in hf.model.layers]
    data = mesh_parity.batch(0)
    with torch.no_grad():
        for ids, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True):
            logits = hf(input_ids=ids[None, :length], output_router_logits=True, use_cache=False).router_logits
            for count, layer in zip(counts, logits, strict=True):
                count += torch.bincount(layer.topk(2, dim=-1).indices.flatten(), minlength=4)
    trainer = mesh_parity.Trainer(hf, values)
    trainer.train(data, packed)
    metrics = trainer.backend.update_metrics()
    return metrics, load_metrics(counts)


def skipped_update(hf: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Run an update whose loss is infinite on one rank, and a valid one after it."""
    backend = backend_of(hf, **values)
    data = mesh_parity.batch(0)
    inputs = build_training_inputs(data, InputLayout(False), CPU)
    before = weights(backend)
    factor = torch.inf if dist.get_rank() == 0 else 1.0
    backend.run([inputs], lambda index, logprobs, entropy: (logprobs * factor).sum(), backward=True)
    norm, stepped = backend.clip_and_step()
    after = weights(backend)
    gradients = [parameter.main_grad for chunk in backend.chunks for parameter in chunk.parameters()]
    zero = all(not gradient.any() for gradient in gradients)
    backend.run([inputs], lambda index, logprobs, entropy: -logprobs.sum() / 100, backward=True)
    sound, moved = backend.clip_and_step()
    then = weights(backend)
    return {
        "norm": norm,
        "stepped": stepped,
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "zero": zero,
        "then": moved and sound < 1e3 and any(not torch.equal(after[name], then[name]) for name in after),
    }


def nothing_scored(hf: Any) -> float:
    """Return the gradient norm of a mesh where one rank has nothing to score, and of one process."""
    trainer = mesh_parity.Trainer(hf, {})
    data = mesh_parity.batch(0)
    data["sample_mask"][:4] = 0.0  # all rows of the first rank
    trainer.train(data, True)
    return float(trainer.backend.clip_and_step()[0])


def norm_in_parts(values: dict[str, Any], bounds: list[int]) -> float:
    """Return the gradient norm of one pass over the batch's rows, cut into microbatches at these bounds."""
    trainer = mesh_parity.Trainer(mesh_parity.model("llama"), values)
    trainer.bounds = bounds
    trainer.train(mesh_parity.batch(0), False)
    return float(trainer.backend.clip_and_step()[0])


def biases_after_an_update(rate: float) -> float:
    """Return by how much the experts' biases move."""
    model = hf_model("deepseek_v3")
    trainer = mesh_parity.Trainer(model, {"moe_router_bias_update_rate": rate})
    named = [*trainer.backend.chunks[0].named_buffers()]
    before = {name: tensor.clone() for name, tensor in named if name.endswith("expert_bias")}
    trainer.train(mesh_parity.batch(0), False)
    moved = [(tensor - before[name]).abs().max().item() for name, tensor in named if name in before]
    assert moved, "the model has such biases"
    return max(moved)


def norm_of_a_large_embedding() -> tuple[float, float]:
    """Return the gradient norm of an embedding of 49,152 tokens and 576 features, and its value in float64."""
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    gradient = torch.randn(49_152, 576, generator=torch.Generator().manual_seed(0))
    want = sum(rows.double().square().sum().item() for rows in gradient.split(4096)) ** 0.5
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with parallel.cuda_names(), on_threads(1):
        return float(get_grad_norm_fp32([gradient], 2, alone)), want


def auxiliary_norm(values: dict[str, Any]) -> float:
    """Return the gradient norm of one pass with Megatron Core's auxiliary loss, over microbatches of four rows."""
    chosen = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0, **values}
    trainer = mesh_parity.Trainer(mesh_parity.model("moe"), chosen)
    trainer.bounds = [4 * number for number in range(mesh_parity.ROWS // trainer.layout.data_parallel_size // 4 + 1)]
    trainer.train(mesh_parity.batch(0), False)
    norm = float(trainer.backend.clip_and_step()[0])
    return norm
