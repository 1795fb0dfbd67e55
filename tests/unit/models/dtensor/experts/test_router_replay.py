"""Router replay with transformers' models: given experts against plain PyTorch, -1 against no replay, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import random_model
from given_experts import blocks_of, logprobs_given, random_experts
from policy_helpers import process_group, random_batch, run_ranks
from test_expert_parallel import CPU, ROWS, _difference, _save, _train_once, _values

from nemo_rl.data.routed_experts import ROUTED_EXPERTS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.dtensor.expert_parallel import find_experts
from nemo_rl.models.dtensor.routers import ReplayedRouters, check_configuration
from nemo_rl.models.policy.batching import count_valid
from nemo_rl.models.training.inputs import InputLayout, build_training_inputs
from nemo_rl.utils.errors import ConfigError

REPLAY = {"router_replay": {"enabled": True}}
CHECKPOINTED = {"activation_checkpointing": True}


def _batch(arch: str, *, reported: bool = True) -> BatchedDataDict[Any]:
    """Make a batch whose experts a router would not choose; with `reported=False` all of them are -1."""
    data = random_batch(rows=ROWS)
    experts = random_experts(random_model(arch), *data["input_ids"].shape)
    data[ROUTED_EXPERTS] = experts if reported else torch.full_like(experts, -1)
    return data


def _train(rank: int, world: int, name: str, values: dict[str, Any], data: BatchedDataDict[Any]) -> dict[str, Any]:
    return _train_once(rank, world, name, values, data)


def _by_plain_pytorch(
    name: str, arch: str, data: BatchedDataDict[Any]
) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """Return scores `[B, T]`, loss and gradients in float64."""
    model = type(random_model(arch)).from_pretrained(name, dtype=torch.float64).train()
    scores = logprobs_given(model, data)
    mask = data["token_mask"] * data["sample_mask"][:, None]
    mask[:, 0] = 0
    loss = -(scores * mask * data["advantages"]).sum() / count_valid(data)[1]
    loss.backward()
    return scores.detach(), loss.item(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def _compare(arch: str, world: int, values: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    name, data = _save(folder, arch, vocab_size=98), _batch(arch)  # tensor-parallel ranks divide it
    parts = run_ranks(_train, world, name, values | REPLAY, data)
    want_scores, want_loss, want_grads = _by_plain_pytorch(name, arch, data)
    scores = {row: part for rank in parts for row, part in rank["scores"].items()}
    if world == 1 or len(scores) == ROWS:
        assert _difference(torch.stack([scores[row] for row in range(ROWS)]), want_scores) < 1e-5
    for part in parts:
        worst = {key: _difference(part["grads"][key], grad) for key, grad in want_grads.items()}
        assert max(worst.values()) < 2e-5, worst
        assert part["metrics"]["moe/replayed_token_share"] == 1.0
        assert part["metrics"]["moe/fallback_token_share"] == 0.0
    assert any("gate" in key and grad.abs().max() > 1e-4 for key, grad in want_grads.items()), "routers are trained"
    return parts


@pytest.mark.parametrize("arch", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(("packed", "more"), [(False, CHECKPOINTED), (True, {})])
def test_given_experts_equal_plain_pytorch(arch, packed, more, tmp_path) -> None:
    """Scores and all gradients, of layers that are computed again in the backward pass as well."""
    _compare(arch, 1, _values(1, packed=packed, **more), tmp_path / "m")


@pytest.mark.parametrize(
    ("arch", "world", "values"),
    [
        ("qwen3_moe", 2, _values(2, packed=True)),
        ("deepseek_v3", 2, _values(1, packed=True, tensor_parallel_size=2)),
        ("qwen3_moe", 2, _values(2, packed=False, tensor_parallel_size=2, sequence_parallel=True)),
        ("qwen3_moe", 2, _values(1, packed=True, context_parallel_size=2) | {"make_sequence_length_divisible_by": 4}),
    ],
    ids=["expert parallel", "tensor parallel", "tensor, sequence and expert parallel", "context parallel"],
)
def test_ranks_replay_the_experts_of_their_tokens(arch, world, values, tmp_path) -> None:
    _compare(arch, world, values, tmp_path / "m")


@pytest.mark.parametrize("more", [CHECKPOINTED, {"virtual_pipeline_size": 1}], ids=["computed again", "kept"])
def test_stages_replay_the_experts_of_their_layers(more: dict[str, Any], tmp_path: Path) -> None:
    """With recomputation, backward passes come between forward passes of other microbatches."""
    name, data = _save(tmp_path / "m", "deepseek_v3"), _batch("deepseek_v3")
    values = _values(1, packed=False, pipeline_parallel_size=2, **more) | {"train_micro_batch_size": 1} | REPLAY
    parts = run_ranks(_train, 2, name, values, data)
    want_scores, want_loss, want_grads = _by_plain_pytorch(name, "deepseek_v3", data)
    scores = parts[-1]["scores"]
    assert _difference(torch.stack([scores[row] for row in range(ROWS)]), want_scores) < 1e-5
    assert parts[-1]["loss"] == pytest.approx(want_loss, rel=1e-5)
    assert set(want_grads) == {key for part in parts for key in part["grads"]}
    for part in parts:
        assert max(_difference(grad, want_grads[key]) for key, grad in part["grads"].items()) < 2e-5
        assert part["metrics"]["moe/replayed_token_share"] == 1.0


@pytest.mark.parametrize("arch", ["qwen3_moe", "deepseek_v3"])
def test_without_reported_experts_nothing_changes(arch, tmp_path) -> None:
    """Bit for bit: all tokens with -1, and with no replay at all."""
    name, values = _save(tmp_path / "m", arch), _values(1, packed=True)
    with_data = _batch(arch, reported=False)
    (fallen,) = run_ranks(_train, 1, name, values | REPLAY, with_data)
    (plain,) = run_ranks(_train, 1, name, values, random_batch(rows=ROWS))
    (replayed,) = run_ranks(_train, 1, name, values | REPLAY, _batch(arch))
    assert all(torch.equal(score, plain["scores"][row]) for row, score in fallen["scores"].items())
    assert all(torch.equal(grad, plain["grads"][key]) for key, grad in fallen["grads"].items())
    assert fallen["metrics"].pop("moe/replayed_token_share") == 0.0
    assert fallen["metrics"].pop("moe/fallback_token_share") == 1.0
    assert fallen["metrics"] == plain["metrics"]
    assert not torch.equal(replayed["scores"][0], plain["scores"][0])


def test_a_token_without_experts_is_routed_beside_tokens_that_have_some() -> None:
    """Its router chooses as without replay, bit for bit, and the others get their experts."""
    model = random_model("deepseek_v3")
    data = _batch("deepseek_v3").slice(0, 1)
    data[ROUTED_EXPERTS][0, 5] = -1
    inputs = build_training_inputs(data, InputLayout(packed=False), CPU)
    hidden = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
    gate = blocks_of(model)[0].gate
    _, own_weights, own = gate(hidden)
    with process_group():
        routers = ReplayedRouters(model, CPU)
        routers.use(inputs)
        _, weights, chosen = gate(hidden)
        routers.stop()
        _, _, later = gate(hidden)
    assert torch.equal(chosen[5], own[5]) and torch.equal(weights[5], own_weights[5])
    others = [place for place in range(24) if place != 5]
    assert torch.equal(chosen[others], data[ROUTED_EXPERTS][0, others, 0].long())
    assert torch.equal(later, own)


@pytest.mark.parametrize(
    ("arch", "overrides", "message"),
    [
        ("qwen3", {}, "Qwen3ForCausalLM has no routers that can be replayed"),
        ("llama4_text", {}, "Llama4ForCausalLM .* that .* cannot be replayed|has no routers"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "DeepseekV2ForCausalLM chooses experts in a way"),
    ],
)
def test_routers_that_cannot_be_replayed_are_refused(arch, overrides, message) -> None:
    """DeepSeek-V2 takes the weights of experts from scores in which those of other groups are 0."""
    own = {"deepseek_v2": {**_DEEPSEEK_V2}}.get(arch, {})
    with pytest.raises(ConfigError, match=message):
        check_configuration(random_model(arch, **own, **overrides).config)


_DEEPSEEK_V2 = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 48, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize("arch", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_other_architectures_replay_given_experts(arch) -> None:
    """Each module of experts gets the recorded experts, which no router would choose for all tokens."""
    model, data, seen = random_model(arch), random_batch(rows=2), []
    experts = random_experts(random_model("qwen3_moe"), *data["input_ids"].shape)  # 2 of 4 experts in 2 layers too
    data[ROUTED_EXPERTS] = experts
    inputs = build_training_inputs(data, InputLayout(packed=False), CPU)
    for module in find_experts(model).values():
        module.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    with process_group():
        routers = ReplayedRouters(model, CPU)
        routers.use(inputs)
        model(**inputs.model_inputs, use_cache=False)
    real = inputs.real_tokens.flatten()
    chosen = torch.stack([index.flatten(0, -2)[real] for index in seen], 1)
    assert torch.equal(chosen, experts.flatten(0, 1)[real].long())


def test_experts_of_another_model_are_refused() -> None:
    data = _batch("qwen3_moe")
    data[ROUTED_EXPERTS] = data[ROUTED_EXPERTS][:, :, :1]
    inputs = build_training_inputs(data, InputLayout(packed=False), CPU)
    with process_group(), pytest.raises(ConfigError, match="reports 2 experts in 1 layers, but .* chooses 2 in 2"):
        ReplayedRouters(random_model("qwen3_moe"), CPU).use(inputs)
