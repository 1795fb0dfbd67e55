"""Rows with one prompt are computed after one copy of it, which changes only rounding."""

from typing import Any
from unittest import mock

import pytest
import torch
from architectures import PACKS, random_model
from policy_helpers import (
    ARCHITECTURES,
    VOCAB,
    WeightedNLL,
    hf_logprobs,
    hf_logprobs_with_grad,
    policy_config,
    process_group,
    save_tiny_model,
    tiny_model,
)

from nemo_rl.data.packing import SHARED_PREFIXES, column_of
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.parallel_logprobs import TopK
from nemo_rl.models.attention import AttentionPlan
from nemo_rl.models.attention.registered import register_varlen_attention
from nemo_rl.models.batch_rows import BatchRows
from nemo_rl.models.dtensor.attention import verify_shared_prompts
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.models.training.inputs import InputLayout, build_score_inputs, build_topk_inputs, build_training_inputs
from nemo_rl.models.training.shared_prefixes import share_prefixes
from nemo_rl.utils.errors import ConfigError

CPU = torch.device("cpu")
PACKED_ROWS = InputLayout(packed=True)
GROUPS = [(12, [7, 3, 7]), (9, [4]), (10, [1, 12])]
"""Tokens of a prompt, and of its answers."""
PACKED = {
    "one_row": {"train_mb_tokens": 128, "logprob_mb_tokens": 128},
    "several_rows": {"train_mb_tokens": 30, "logprob_mb_tokens": 40},
}


def groups_batch(seed: int = 0) -> BatchedDataDict[Any]:
    """Make samples of three prompts; the policy generated two turns of the first, and the second is masked."""
    gen = torch.Generator().manual_seed(seed)
    rows, width = [], max(prompt + max(answers) for prompt, answers in GROUPS)
    for prompt, answers in GROUPS:
        tokens = torch.randint(3, VOCAB, (prompt,), generator=gen)
        for answer in answers:
            ids = torch.cat([tokens, torch.randint(3, VOCAB, (answer,), generator=gen)])
            written = (torch.arange(width) >= prompt) & (torch.arange(width) < len(ids))
            rows.append((torch.nn.functional.pad(ids, (0, width - len(ids))), len(ids), written.float()))
    ids, lengths, masks = zip(*rows, strict=True)
    mask = torch.stack(masks)
    mask[0, 14:16] = 0.0
    sample_mask = torch.ones(len(rows))
    sample_mask[1] = 0.0
    advantages = torch.randn(len(rows), 1, generator=gen).expand(len(rows), width).contiguous()
    return BatchedDataDict(
        {
            "input_ids": torch.stack(ids),
            "input_lengths": torch.tensor(lengths),
            "token_mask": mask,
            "sample_mask": sample_mask,
            "advantages": advantages,
        }
    )


def sharing(data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """Return a microbatch with what its rows share, as the driver sends it."""
    column = column_of(BatchRows.of(data).prefixes(), range(data.size))
    return BatchedDataDict(data.data | {SHARED_PREFIXES: column})


def worker_of(config: Any) -> PolicyWorker:
    return PolicyWorker(DTensorBackend(config, CPU), config)


def scores_and_gradients(config: Any, data: BatchedDataDict[Any]) -> tuple[torch.Tensor, float, dict[str, Any], int]:
    """Return log-probabilities, loss, gradients, and the tokens that the model saw in training."""
    seen = 0
    with process_group():
        worker = worker_of(config)
        assert worker.shares_prompts()
        batch = shard_batch(data, 1, logprob_strategy(config), shares_prompts=True)
        scores = batch.restore([worker.get_logprobs(batch.data[0], batch.sizes[0])])
        grads: dict[str, torch.Tensor] = {}

        def count(module: Any, args: Any, kwargs: Any) -> None:
            nonlocal seen
            seen += kwargs["input_ids"].numel()

        def keep() -> tuple[float, bool]:
            grads.update({name: p.grad.clone() for name, p in worker.backend.model.hf.named_parameters()})
            return 0.0, True

        worker.backend.model.hf.base_model.register_forward_pre_hook(count, with_kwargs=True)
        worker.backend.clip_and_step = keep
        batch = shard_batch(data, 1, training_strategy(config), shares_prompts=True)
        trained = worker.train(batch.data[0], batch.sizes[0], WeightedNLL(), count_valid(data))
    return scores, trained.loss, grads, seen


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("others", [{}, {"make_sequence_length_divisible_by": 8}], ids=["plain", "rounded"])
def test_scores_loss_and_gradients_equal_those_of_single_rows(arch, packed, others, tmp_path) -> None:
    data, tie = groups_batch(), arch in ("qwen2", "gemma3")
    name = save_tiny_model(tmp_path / arch, arch, tie=tie)
    reference = tiny_model(arch, tie=tie).eval().double()
    with torch.no_grad():
        want_scores = hf_logprobs(reference, data)
    mask = data["token_mask"] * data["sample_mask"][:, None]
    want_loss = -(hf_logprobs_with_grad(reference, data) * mask * data["advantages"]).sum() / count_valid(data)[1]
    want_loss.backward()
    config = policy_config(name, sequence_packing={"enabled": True, **PACKED[packed]}, **others)
    scores, loss, grads, seen = scores_and_gradients(config, data)
    torch.testing.assert_close(scores.double(), want_scores, rtol=0, atol=2e-4)
    assert loss == pytest.approx(want_loss.item(), abs=2e-5)
    for key, parameter in reference.named_parameters():
        scale = max(parameter.grad.abs().max().item(), 1e-3)
        assert (grads[key].double() - parameter.grad).abs().max().item() <= 2e-4 * scale, key
    assert seen < int(data["input_lengths"].sum())


def test_a_group_that_fits_holds_its_prompt_once() -> None:
    data = groups_batch()
    inputs = build_training_inputs(sharing(data), PACKED_ROWS, CPU)
    # Prompts but for their last token, twice; then each row from there, or all of it.
    assert inputs.model_inputs["input_ids"].numel() == 11 + 9 + (1 + 7) + (1 + 3) + (1 + 7) + (9 + 4) + (1 + 1) + (
        1 + 12
    )
    ids, positions = (inputs.model_inputs[key][0] for key in ("input_ids", "position_ids"))
    assert positions[:20].tolist() == [*range(9), *range(11)]
    assert ids[:9].tolist() == data["input_ids"][4, :9].tolist()
    assert ids[9:20].tolist() == data["input_ids"][0, :11].tolist()


@pytest.mark.parametrize("round_to", [1, 16])
def test_each_token_of_each_row_keeps_its_place_and_position_id(round_to) -> None:
    data = groups_batch()
    lengths = data["input_lengths"].tolist()
    layout = share_prefixes(data["input_ids"], lengths, BatchRows.of(data).prefixes(), round_to)
    ids, positions = layout.model_inputs["input_ids"][0], layout.model_inputs["position_ids"][0]
    for row, length in enumerate(lengths):
        columns = torch.arange(length)
        places = layout.places(torch.full_like(columns, row), columns)
        assert ids[places].tolist() == data["input_ids"][row, :length].tolist()
        assert positions[places].tolist() == columns.tolist()
    assert len(ids) % round_to == 0
    assert layout.num_tokens <= len(ids) < layout.num_tokens + round_to


def test_whole_rows_and_top_logits_are_recovered_after_shared_prompts() -> None:
    data = groups_batch()
    model = tiny_model("qwen2").eval()
    model.set_attn_implementation(register_varlen_attention())
    for build in (build_score_inputs, lambda rows, layout, device: build_topk_inputs(rows, TopK(2), layout, device)):
        found = []
        for rows in (data, sharing(data)):
            inputs = build(rows, PACKED_ROWS, CPU)
            with torch.no_grad():
                hidden = model.model(**inputs.model_inputs, use_cache=False).last_hidden_state.flatten(0, 1)
            found.append((inputs, inputs.scatter(hidden[inputs.positions_K])))
        (packed, want), (shared, got) = found
        assert shared.model_inputs["input_ids"].numel() < packed.model_inputs["input_ids"].numel()
        assert torch.equal(packed.places_K, shared.places_K)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_rows_without_shared_prompts_equal_plain_packing_bit_for_bit() -> None:
    data = groups_batch().select_indices([0, 3, 4])
    plain, shared = (build_training_inputs(rows, PACKED_ROWS, CPU) for rows in (data, sharing(data)))
    assert shared.model_inputs.keys() == plain.model_inputs.keys()
    assert torch.equal(shared.model_inputs["input_ids"], plain.model_inputs["input_ids"])
    assert torch.equal(shared.positions_K, plain.positions_K)


def test_parts_of_equal_size_take_one_call() -> None:
    data = groups_batch()
    layout = share_prefixes(data["input_ids"], data["input_lengths"].tolist(), BatchRows.of(data).prefixes(), 1)
    plan = layout.model_inputs["divided_row"].plan
    runs = plan.runs(sum(piece.keys for piece in plan.pieces))
    assert [(run.queries, run.keys, run.pieces) for run in runs] == [
        (9, 9, 1),
        (11, 11, 1),
        (13, 13, 1),
        (2, 11, 1),
        (13, 22, 1),
        (4, 15, 1),
        (8, 19, 2),
    ]


@pytest.mark.parametrize("model_type", PACKS)
def test_models_that_pack_can_share_prompts(model_type) -> None:
    model = random_model(model_type)
    model.set_attn_implementation(register_varlen_attention())
    verify_shared_prompts(model)


@pytest.mark.parametrize("model_type", ["minimax", "stablelm", "llama4_text", "doge"])
def test_models_that_mix_tokens_outside_attention_cannot_share_prompts(model_type) -> None:
    model = random_model(model_type)
    model.set_attn_implementation(register_varlen_attention())
    with pytest.raises(ConfigError, match=r"(?s)ForCausalLM"):
        verify_shared_prompts(model)


def test_the_probe_notices_a_missing_key() -> None:
    model = tiny_model("qwen2")
    model.set_attn_implementation(register_varlen_attention())
    with (
        mock.patch.object(
            AttentionPlan,
            "within",
            lambda self, window: AttentionPlan([p._replace(key_start=p.key_stop - p.queries) for p in self.pieces]),
        ),
        pytest.raises(ConfigError, match="outputs for shared sequences differ"),
    ):
        verify_shared_prompts(model)


@pytest.mark.parametrize(
    ("packing", "shares"),
    [({"enabled": True}, True), ({"enabled": True, "share_prompts": False}, False), ({"enabled": False}, False)],
)
def test_prompts_are_shared_with_packing_unless_switched_off(packing, shares, tmp_path) -> None:
    config = policy_config(save_tiny_model(tmp_path / "m"), sequence_packing=packing)
    with process_group():
        assert worker_of(config).shares_prompts() is shares


def test_trained_experts_count_each_prompt_once_per_row(tmp_path) -> None:
    path = tmp_path / "moe"
    random_model("qwen3_moe").save_pretrained(path)
    config = policy_config(str(path), sequence_packing={"enabled": True})
    with process_group():
        assert not worker_of(config).shares_prompts()
        frozen = DTensorBackend(config, CPU, init_optimizer=False)
        assert PolicyWorker(frozen, config).shares_prompts()
