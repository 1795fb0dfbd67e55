"""Ranks that divide rows equal one process of plain transformers: scores, loss, every gradient."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import random_model
from hypothesis import given
from hypothesis import strategies as st
from policy_helpers import VOCAB, WeightedNLL, hf_logprobs, policy_config, random_batch, run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification

from nemo_rl.config import row_length_multiple
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.context_parallel import Chunks, _ExchangedRow
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker, input_layout
from nemo_rl.models.training.inputs import InputLayout, all_targets, build_model_inputs
from nemo_rl.utils.errors import ConfigError

CPU = torch.device("cpu")
ALLOWED = 1e-5
LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 96}},
    "padded": {"train_micro_batch_size": 2, "logprob_batch_size": 3},
}
ROWS = random_batch(rows=6, width=24)


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def save_model(folder: Path, model_type: str) -> str:
    random_model(model_type, initializer_range=0.1).save_pretrained(folder / model_type)
    return str(folder / model_type)


def reference(model_type: str) -> dict[str, Any]:
    """Return loss, gradients and log-probs of transformers' eager attention, row by row, unpadded."""
    model = random_model(model_type, initializer_range=0.1)
    model.set_attn_implementation("eager")
    logprobs = hf_logprobs(model, ROWS)
    _, tokens = count_valid(ROWS)
    loss, _ = WeightedNLL()(logprobs[:, 1:], ROWS, None, tokens)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.item(), "gradients": gradients, "logprobs": logprobs.detach()}


def on_ranks(rank: int, world_size: int, cases: dict[Any, tuple[str, dict[str, Any]]]) -> dict[Any, dict[str, Any]]:
    """Return the results of one rank's worker for each case: a model's folder, and values of the policy section."""
    return {key: _one_case(rank, world_size, name, values) for key, (name, values) in cases.items()}


def _one_case(rank: int, world_size: int, name: str, values: dict[str, Any]) -> dict[str, Any]:
    config = policy_config(name, **values)
    layout = ParallelLayout.of(config, world_size)
    worker = PolicyWorker(DTensorBackend(config, CPU, layout), config)
    dp_rank = layout.data_parallel_rank(rank)
    out: dict[str, Any] = {}

    def keep_gradients() -> tuple[float, bool]:
        named = worker.backend.model.hf.named_parameters()
        out["gradients"] = {key: full(p.grad) for key, p in named if p.grad is not None}
        worker.backend.model.zero_grad()
        return 0.0, True

    worker.backend.clip_and_step = keep_gradients
    batch = shard_batch(ROWS, layout.data_parallel_size, training_strategy(config))
    out["loss"] = worker.train(batch.data[dp_rank], batch.sizes[dp_rank], WeightedNLL(), count_valid(ROWS)).loss
    scored = shard_batch(ROWS, layout.data_parallel_size, logprob_strategy(config))
    out["logprobs"] = worker.get_logprobs(scored.data[dp_rank], scored.sizes[dp_rank])
    out["plan"], out["ranks"] = scored, layout.result_ranks
    return out


def differences(parts: list[dict[str, Any]], want: dict[str, Any]) -> dict[str, float]:
    """Return the largest relative difference of loss, gradients (the worst tensor) and log-probs on any rank."""
    answers = [parts[rank] for rank in parts[0]["ranks"]]
    logprobs = parts[0]["plan"].restore([part["logprobs"] for part in answers])
    gradients = [
        _relative(part["gradients"][name], gradient) for part in parts for name, gradient in want["gradients"].items()
    ]
    return {
        "loss": abs(sum(part["loss"] for part in answers) - want["loss"]) / abs(want["loss"]),
        "gradients": max(gradients),
        "logprobs": _relative(logprobs, want["logprobs"]),
    }


def _relative(got: Tensor, want: Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()


def case(folder: Path, model_type: str, layout: str, method: str, cp: int, **parallel: Any) -> tuple[str, dict]:
    section = {"context_parallel_size": cp, "context_parallel_method": method, **parallel}
    return save_model(folder, model_type), {**LAYOUTS[layout], "dtensor_cfg": section}


def divided(cp: int, method: str = "all_gather", **values: Any) -> dict[str, Any]:
    return {"context_parallel_size": cp, "context_parallel_method": method, **values}


CASES: dict[int, list[tuple[str, str, dict[str, Any]]]] = {
    2: [
        ("llama", "packed", divided(2)),
        ("llama", "padded", divided(2, "ulysses", activation_checkpointing=True)),
        ("gemma3_text", "packed", divided(2, "ulysses")),
        ("gpt_oss", "packed", divided(2, activation_checkpointing=True)),
        ("gpt_oss", "padded", divided(2, "ulysses")),
        ("gemma2", "packed", divided(2)),
        ("deepseek_v3", "packed", divided(2)),
        ("deepseek_v3", "padded", divided(2, "ulysses")),
        ("mistral", "padded", divided(2)),
    ],
    4: [
        ("qwen3", "packed", divided(2)),
        ("qwen3", "packed", divided(4)),
        ("qwen2", "padded", divided(4, "ulysses")),  # 2 key heads for 4 ranks
        ("llama", "padded", divided(2, dp_replicate_size=2)),
    ],
}


@pytest.mark.parametrize("world_size", CASES)
def test_ranks_that_split_rows_equal_transformers_in_one_process(world_size, tmp_path) -> None:
    cases = CASES[world_size]
    wanted = {model_type: reference(model_type) for model_type, _, _ in cases}
    given_to_ranks = {
        index: (save_model(tmp_path, model_type), {**LAYOUTS[layout], "dtensor_cfg": section})
        for index, (model_type, layout, section) in enumerate(cases)
    }
    parts = run_ranks(on_ranks, world_size, given_to_ranks)
    found = {
        (model_type, layout, *section.values()): differences([part[index] for part in parts], wanted[model_type])
        for index, (model_type, layout, section) in enumerate(cases)
    }
    assert {key: diffs for key, diffs in found.items() if not max(diffs.values()) < ALLOWED} == {}


def _scores(rank: int, world_size: int, name: str, scorer_name: str, method: str) -> dict[Any, Any]:
    section = {"dtensor_cfg": divided(2, method)}
    out: dict[Any, Any] = {}
    for layout, values in LAYOUTS.items():
        config = policy_config(name, **values, **section)
        worker = PolicyWorker(DTensorBackend(config, CPU), config)
        scored = shard_batch(ROWS, 1, logprob_strategy(config))
        rows = (scored.data[0], scored.sizes[0])
        before = worker.get_logprobs(*rows)
        batch = shard_batch(ROWS, 1, training_strategy(config))
        worker.train(batch.data[0], batch.sizes[0], WeightedNLL(), count_valid(ROWS))
        out["moved", layout] = (worker.get_logprobs(*rows) - before).abs().max().item()
        out["reference", layout] = (worker.get_reference_policy_logprobs(*rows) - before).abs().max().item()
        with worker.backend.reference_weights():
            out["topk", layout] = [scored.restore([part]) for part in worker.get_topk_logits(*rows, 5)]
            out["layers", layout] = worker.layer_outputs(list(range(3, 14)))[1]
        config = policy_config(scorer_name, reward_model_cfg={"enabled": True}, **values, **section)
        scorer = PolicyWorker(DTensorBackend(config, CPU, init_optimizer=False), config)
        out["rewards", layout] = scored.restore([scorer.score(*rows)])
    return out


@pytest.mark.parametrize("method", ["all_gather", "ulysses"])
def test_all_scores_equal_those_of_whole_rows(method, tmp_path) -> None:
    """Reference log-probs after an update, top-k logits, hidden states of layers, rewards of whole sequences."""
    name = save_model(tmp_path, "qwen3")
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1)
    classifier.save_pretrained(tmp_path / "scorer")
    model = random_model("qwen3", initializer_range=0.1)
    hidden = model(input_ids=torch.arange(3, 14)[None], output_hidden_states=True).hidden_states[1][0]
    rows = [ids[:length] for ids, length in zip(ROWS["input_ids"], ROWS["input_lengths"].tolist(), strict=True)]
    want = [model(input_ids=row[None]).logits[0] for row in rows]
    rewards = torch.cat([classifier(input_ids=row[None]).logits[0] for row in rows])
    for part in run_ranks(_scores, 2, name, str(tmp_path / "scorer"), method):
        for layout in LAYOUTS:
            assert part["moved", layout] > 1e-2 and part["reference", layout] == 0
            for row, got, ids in zip(want, *part["topk", layout], strict=True):
                close(got[: len(row)], row.topk(5).values)
                close(got[: len(row)], row.gather(-1, ids[: len(row)]))
            close(part["layers", layout][0], hidden)
            close(part["rewards", layout], rewards)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5 * want.abs().max().item())


def _after_different_rows(rank: int, world_size: int, name: str, method: str) -> list[Tensor]:
    """Return the scores of one sequence, packed after different ones."""
    config = policy_config(name, dtensor_cfg=divided(2, method), **LAYOUTS["packed"])
    worker = PolicyWorker(DTensorBackend(config, CPU, init_optimizer=False), config)
    rows = []
    for neighbour in (0, 5):
        data = ROWS.select_indices([1, 2])
        data["input_ids"][0] = (data["input_ids"][0] + neighbour) % VOCAB
        rows.append(worker.get_logprobs(data, [2])[1])
    return rows


@pytest.mark.parametrize("method", ["all_gather", "ulysses"])
def test_no_rank_attends_beyond_a_sequence(method, tmp_path) -> None:
    for first, second in run_ranks(_after_different_rows, 2, save_model(tmp_path, "llama"), method):
        assert first.any() and torch.equal(first, second)


@given(ranks=st.integers(1, 4), chunk=st.integers(1, 5), data=st.data())
def test_the_ranks_share_the_causal_pairs_of_each_segment_evenly(ranks, chunk, data) -> None:
    total = 2 * ranks * chunk
    edges = [0, *sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=6)) if total > 1 else []), total]
    seen, work, largest = torch.zeros(total, total), [], 0
    for rank in range(ranks):
        chunks = Chunks.balanced(edges, ranks, rank)
        tokens = chunks.take(torch.arange(total)[None])[0]
        assert [p.query_start for p in chunks.pieces] == [0, *(p.query_stop for p in chunks.pieces[:-1])]
        assert chunks.pieces[-1].query_stop == len(tokens) == 2 * chunk
        each = [0, 0]
        for piece in chunks.pieces:
            for query in range(piece.query_start, piece.query_stop):
                last = piece.key_stop - piece.query_stop + query  # aligned at the bottom right
                seen[tokens[query], piece.key_start : last + 1] += 1
                each[query // chunk] += last + 1 - piece.key_start
        assert sum(each) == sum(piece.work for piece in chunks.pieces)
        work.append(sum(each))
        largest = max(largest, *each)
    segment = torch.bucketize(torch.arange(total), torch.tensor(edges[1:]), right=True)
    position = torch.arange(total)
    assert torch.equal(seen, ((segment[:, None] == segment) & (position[:, None] >= position)).float())
    assert max(work) - min(work) <= (0 if len(edges) == 2 else largest)


def test_tokens_return_to_their_positions() -> None:
    row, chunks = torch.arange(24), Chunks.balanced([0, 24], 3, 0)
    of_ranks = torch.cat([Chunks.balanced([0, 24], 3, rank).take(row[None])[0] for rank in range(3)])
    assert of_ranks[:8].tolist() == [0, 1, 2, 3, 20, 21, 22, 23]
    assert torch.equal(chunks.to_row(of_ranks, 0), row) and torch.equal(chunks.to_ranks(row, 0), of_ranks)


@pytest.mark.parametrize(
    ("section", "multiple", "want"),
    [
        ({"context_parallel_size": 2}, 1, 4),
        ({"context_parallel_size": 4}, 6, 24),
        ({"tensor_parallel_size": 4, "sequence_parallel": True}, 1, 4),
        ({"tensor_parallel_size": 3, "sequence_parallel": True, "context_parallel_size": 2}, 1, 12),
        ({"tensor_parallel_size": 4, "context_parallel_size": 2}, 5, 20),
        ({}, 3, 3),
    ],
)
def test_rows_are_padded_to_a_length_that_the_ranks_divide(section, multiple, want) -> None:
    config = policy_config("m", dtensor_cfg=section, make_sequence_length_divisible_by=multiple)
    assert row_length_multiple(config) == input_layout(config).round_to == want
    rounded = {"enabled": True, "sequence_length_round": 10}
    config = config.model_copy(update={"dynamic_batching": config.dynamic_batching.model_copy(update=rounded)})
    assert input_layout(config).round_to == training_strategy(config).round_to == math.lcm(want, 10)


def test_heads_that_do_not_divide_are_refused_with_the_arithmetic() -> None:
    row = _ExchangedRow(Chunks.balanced([0, 8], 4, 0), None)
    with pytest.raises(ConfigError, match="divides the 6 attention heads .* 6 is no multiple of 4.*size=3 or .*all_ga"):
        row.enter(*(torch.zeros(1, heads, 2, 8) for heads in (6, 3, 3)))


def _rows_of_ten_tokens(rank: int, world_size: int, name: str) -> str:
    backend = DTensorBackend(policy_config(name, dtensor_cfg=divided(2)), CPU, init_optimizer=False)
    data = random_batch(rows=2, width=10)
    inputs = build_model_inputs(data, all_targets(data), InputLayout(packed=False), CPU)
    with pytest.raises(ConfigError) as refused:
        backend.run([inputs], lambda *_: None, backward=False)
    return str(refused.value)


def test_rows_that_do_not_divide_are_refused_with_the_arithmetic(tmp_path) -> None:
    (refused, _) = run_ranks(_rows_of_ten_tokens, 2, save_model(tmp_path, "llama"))
    assert "rows of 10 tokens do not divide into 4 equal chunks" in refused
