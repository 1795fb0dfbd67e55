"""A vocabulary that ranks divide, against plain float64 formulas on the whole vocabulary."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from policy_helpers import run_ranks, tiny_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from nemo_rl.distributed.parallel_logprobs import (
    LogitTransform,
    SamplingDensity,
    TopK,
    apply_top_k_top_p,
    token_logprobs,
    topk_logits,
)
from nemo_rl.distributed.ranks import collectives
from nemo_rl.models.dtensor.heads import CausalLMWithLogprobs, RewardModel, build_causal_lm

N, D, V, K = 23, 16, 52, 3


class Case(NamedTuple):
    density: SamplingDensity = SamplingDensity()
    transform: LogitTransform = LogitTransform()
    bias: bool = False
    num_targets: int | None = None
    chunk_size: int = 8
    scale: float = 1.0
    dtype: torch.dtype = torch.float64


CASES = {
    "plain": Case(),
    "one chunk, bias": Case(bias=True, chunk_size=512),
    "temperature": Case(SamplingDensity(0.7), bias=True),
    "several targets": Case(SamplingDensity(1.3), num_targets=K),
    "top-k": Case(SamplingDensity(0.8, top_k=9)),
    "top-p": Case(SamplingDensity(top_p=0.6), num_targets=K),
    "top-k and top-p": Case(SamplingDensity(1.2, 20, 0.9), bias=True),
    "one token left": Case(SamplingDensity(top_k=1)),
    "soft cap": Case(SamplingDensity(0.7), LogitTransform(cap=5.0), bias=True),
    "scale and cap, filtered": Case(SamplingDensity(0.7, 9), LogitTransform(0.5, 4.0), bias=True),
    "extreme logits": Case(scale=300.0),
    "float32": Case(SamplingDensity(0.7), bias=True, dtype=torch.float32),
    "bfloat16": Case(dtype=torch.bfloat16),
}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest error as a share of the largest value, 1 at least; logits a hundred times as large are as much less exact."""


def inputs_of(case: Case) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Make hidden states, head, bias and targets; the first targets are the first and last id of every quarter."""
    gen = torch.Generator().manual_seed(0)
    hidden = (case.scale * torch.randn(N, D, generator=gen, dtype=torch.float64)).to(case.dtype)
    weight = torch.randn(V, D, generator=gen, dtype=torch.float64).to(case.dtype)
    bias = torch.randn(V, generator=gen, dtype=torch.float64).to(case.dtype) if case.bias else None
    targets = torch.randint(0, V, (N, case.num_targets or 1), generator=gen)
    edges = torch.tensor([0, 12, 13, 25, 26, 38, 39, 51])
    targets[: len(edges), 0] = edges
    return hidden, weight, bias, targets if case.num_targets else targets[:, 0]


def weighed(logprobs: Tensor, entropy: Tensor) -> Tensor:
    """Return a sum in which every result has another weight."""
    of_logprobs = torch.linspace(-1, 2, logprobs.numel()).view(logprobs.shape)
    return (of_logprobs * logprobs).sum() + (torch.linspace(1, 0.2, N) * entropy).sum()


def reference(case: Case) -> list[Tensor]:
    """Return log-probs, entropies and gradients of hidden states, weight and bias from the definition."""
    hidden, weight, bias, targets = inputs_of(case)
    leaves = [tensor.double().requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]
    logits = leaves[0] @ leaves[1].t() + (leaves[2] if bias is not None else 0.0)
    logits = case.transform.scale * logits
    if case.transform.cap is not None:
        logits = case.transform.cap * torch.tanh(logits / case.transform.cap)
    logits = logits / case.density.temperature
    columns = targets.view(N, -1)
    _, keep = apply_top_k_top_p(logits.detach(), case.density.top_k, case.density.top_p)
    if keep is not None:
        logits = logits.masked_fill(~keep.scatter(-1, columns, True), -math.inf)
    logp = torch.log_softmax(logits, dim=-1)
    entropy = -torch.where(logp > -math.inf, logp.exp() * logp.clamp(min=-1e300), 0.0).sum(-1)
    logprobs = logp.gather(-1, columns).view(targets.shape)
    return [logprobs, entropy, *torch.autograd.grad(weighed(logprobs, entropy), leaves)]


def rows_of(tensor: Tensor, rank: int, world_size: int) -> Tensor:
    return tensor.chunk(world_size)[rank].clone()


def _score(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    group = _get_default_group()
    results = {}
    for name, case in CASES.items():
        hidden, weight, bias, targets = inputs_of(case)
        here = [hidden, *(rows_of(tensor, rank, world_size) for tensor in (weight, bias) if tensor is not None)]
        leaves = [tensor.requires_grad_() for tensor in here]
        logprobs, entropy = token_logprobs(
            leaves[0],
            leaves[1],
            targets,
            density=case.density,
            bias_V=leaves[2] if case.bias else None,
            transform=case.transform,
            group=group,
            chunk_size=case.chunk_size,
        )
        grads = torch.autograd.grad(weighed(logprobs, entropy), leaves)
        results[name] = [tensor.detach() for tensor in (logprobs, entropy, *grads)]
    none = token_logprobs(hidden[:0], leaves[1], targets[:0], group=group)[0]
    results["no tokens"] = [none.detach(), *torch.autograd.grad(none.sum(), leaves)]
    return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_scores_and_gradients_of_a_divided_vocabulary_equal_the_whole(world_size) -> None:
    by_rank = run_ranks(_score, world_size)
    for name, case in CASES.items():
        parts = [results[name] for results in by_rank]
        for logprobs, entropy, *_ in parts:
            assert torch.equal(logprobs, parts[0][0]) and torch.equal(entropy, parts[0][1]), name
        wide = torch.promote_types(case.dtype, torch.float32)
        assert parts[0][0].dtype == parts[0][1].dtype == wide, name
        grad_hidden = torch.stack([part[2].double() for part in parts]).sum(0)
        grads_of_rows = [torch.cat(rows) for rows in zip(*(part[3:] for part in parts), strict=True)]
        got = [*parts[0][:2], grad_hidden, *grads_of_rows]
        for tensor, want in zip(got, reference(case), strict=True):
            error = (tensor.double() - want).abs().max() / want.abs().max().clamp(min=1.0)
            assert tensor.shape == want.shape and error <= case.scale * TOLERANCE[case.dtype], (name, error)
    for none in (results["no tokens"] for results in by_rank):
        assert none[0].shape == (0,) and not any(grad.any() for grad in none[1:])


TOPS = [TopK(5), TopK(5, 40), TopK(20, 21), TopK(9, 13), TopK(V), TopK(9, 13, 0.7), TopK(5, temperature=1.0)]


def _largest(rank: int, world_size: int) -> list[tuple[Tensor, Tensor]]:
    hidden, weight, bias, _ = inputs_of(Case(bias=True))
    assert bias is not None
    rows = [rows_of(tensor, rank, world_size) for tensor in (weight, bias)]
    group = _get_default_group()
    return [
        topk_logits(hidden, rows[0], top, bias_V=rows[1], transform=LogitTransform(0.5, 9.0), group=group, chunk_size=8)
        for top in TOPS
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_largest_logits_of_a_divided_vocabulary_equal_the_whole(world_size) -> None:
    """Also where the end of the vocabulary leaves a rank few ids, or none."""
    hidden, weight, bias, _ = inputs_of(Case(bias=True))
    assert bias is not None
    logits = 9.0 * torch.tanh(0.5 * (hidden @ weight.t() + bias) / 9.0)
    for results in run_ranks(_largest, world_size):
        for top, (values, ids) in zip(TOPS, results, strict=True):
            considered = logits[:, : top.vocab_size]
            if top.temperature is not None:
                considered = torch.log_softmax(considered / top.temperature, dim=-1)
            want = considered.topk(top.k)
            assert torch.equal(ids, want.indices)
            torch.testing.assert_close(values, want.values, rtol=0, atol=1e-12)


TOKENS, POSITIONS = torch.arange(24).view(2, 12) % 19, torch.tensor([0, 3, 10, 12, 17, 22])


def language_model() -> PreTrainedModel:
    hf = tiny_model("qwen2", vocab_size=52).double().eval()
    hf.lm_head.bias = Parameter(torch.linspace(-1, 1, 52, dtype=torch.float64))
    return hf


def scoring_model() -> PreTrainedModel:
    config = tiny_model("qwen2").config
    config.num_labels = 1
    torch.manual_seed(3)
    return AutoModelForSequenceClassification.from_config(config).double().eval()


def divide_rows(hf: PreTrainedModel) -> None:
    """Give each rank its tokens of every row, as the body does under sequence parallelism."""
    group = _get_default_group()

    def divide(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = collectives.split(output.last_hidden_state, 1, group)
        return output

    hf.base_model.register_forward_hook(divide)


def gradients(model: CausalLMWithLogprobs | RewardModel) -> Iterator[tuple[str, Tensor]]:
    """Return the gradients of a loss on both results, for every parameter whole."""
    scores, entropy = model({"input_ids": TOKENS}, POSITIONS, POSITIONS + 26)
    (scores * torch.linspace(-1, 2, len(POSITIONS)) + 0.3 * entropy).sum().backward()
    yield "scores", scores.detach()
    yield "entropy", entropy.detach()
    for name, parameter in model.hf.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad


def _models(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    found = []
    for sequence_parallel in (False, True):
        model = build_causal_lm(language_model(), divides_head=True)
        head: Any = model.hf.get_output_embeddings()
        head.weight, head.bias = (Parameter(distribute_tensor(p, mesh, [Shard(0)])) for p in (head.weight, head.bias))
        model.tp_group, model.sequence_parallel = mesh.get_group(), sequence_parallel
        if sequence_parallel:
            divide_rows(model.hf)
        found.append(dict(gradients(model)))
        with torch.no_grad():
            found[-1]["ids"] = model({"input_ids": TOKENS}, POSITIONS, POSITIONS, top_k=TopK(4, 50))[1]
    reward = RewardModel(scoring_model())
    reward.tp_group, reward.sequence_parallel = mesh.get_group(), True
    divide_rows(reward.hf)
    return [*found, dict(gradients(reward))]


def test_models_train_alike_with_a_divided_head_and_divided_rows() -> None:
    whole = build_causal_lm(language_model())
    want = dict(gradients(whole))
    with torch.no_grad():
        want["ids"] = whole({"input_ids": TOKENS}, POSITIONS, POSITIONS, top_k=TopK(4, 50))[1]
    expected = [want, want, dict(gradients(RewardModel(scoring_model())))]
    for of_rank in run_ranks(_models, 2):
        for got, wanted in zip(of_rank, expected, strict=True):
            assert got.keys() == wanted.keys()
            for name in wanted:
                torch.testing.assert_close(got[name], wanted[name], rtol=1e-9, atol=1e-11, msg=name)
