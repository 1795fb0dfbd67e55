"""Packed equals padded equals one by one: scores, loss and gradients, for each architecture."""

import pytest
import torch
from policy_helpers import (
    ARCHITECTURES,
    WeightedNLL,
    hf_logprobs,
    hf_logprobs_with_grad,
    policy_config,
    process_group,
    random_batch,
    save_tiny_model,
    tiny_model,
)
from transformers import Gemma2Config, Gemma2ForCausalLM

from nemo_rl.models.attention.registered import register_varlen_attention
from nemo_rl.models.dtensor.attention import verify_packing
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker, input_layout
from nemo_rl.models.training.inputs import InputLayout, all_targets, build_model_inputs
from nemo_rl.utils.errors import ConfigError

CPU = torch.device("cpu")
LAYOUTS = {
    "one_by_one": {"train_micro_batch_size": 1, "logprob_batch_size": 1},
    "padded": {"train_micro_batch_size": 3, "logprob_batch_size": 4},
    "padded_rounded": {"train_micro_batch_size": 6, "make_sequence_length_divisible_by": 16},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 50, "logprob_mb_tokens": 64}},
    "packed_rounded": {
        "sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64},
        "make_sequence_length_divisible_by": 8,
    },
    "dynamic": {
        "dynamic_batching": {
            "enabled": True,
            "train_mb_tokens": 48,
            "logprob_mb_tokens": 64,
            "sequence_length_round": 4,
        }
    },
    "checkpointed": {"train_micro_batch_size": 2, "dtensor_cfg": {"activation_checkpointing": True}},
    "packed_checkpointed": {
        "sequence_packing": {"enabled": True, "train_mb_tokens": 64},
        "dtensor_cfg": {"activation_checkpointing": True},
    },
}


def _worker(config) -> PolicyWorker:
    return PolicyWorker(DTensorBackend(config, CPU), config)


def _gradients(worker: PolicyWorker, config, data):
    """Return loss and gradients of one update, before the optimizer."""
    batch = shard_batch(data, 1, training_strategy(config))
    result = worker.train(batch.data[0], batch.sizes[0], WeightedNLL(), count_valid(data), eval_mode=True)
    grads: dict[str, torch.Tensor] = {}

    def keep() -> tuple[float, bool]:
        for name, parameter in worker.backend.model.hf.named_parameters():
            grads[name] = parameter.grad.clone()
        worker.backend.model.zero_grad()
        return 0.0, True

    worker.backend.clip_and_step = keep
    trained = worker.train(batch.data[0], batch.sizes[0], WeightedNLL(), count_valid(data))
    assert trained.loss == pytest.approx(result.loss, abs=1e-6)
    assert trained.metrics["lp_min"] == pytest.approx(result.metrics["lp_min"], abs=1e-5)
    return trained, grads


def _reference_gradients(model, data):
    """Compute the same loss by Hugging Face alone, in float64."""
    model = model.double()
    scores = hf_logprobs_with_grad(model, data)
    mask = data["token_mask"] * data["sample_mask"][:, None]
    mask[:, 0] = 0
    loss = -(scores * mask * data["advantages"]).sum() / count_valid(data)[1]
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_layout_gives_the_same_scores_loss_and_gradients(arch, tmp_path) -> None:
    name = save_tiny_model(tmp_path / arch, arch, tie=arch in ("qwen2", "gemma3"))
    data = random_batch(rows=6, width=24)
    model = tiny_model(arch, tie=arch in ("qwen2", "gemma3")).eval()
    with torch.no_grad():
        want_scores = hf_logprobs(model.double(), data)
    want_loss, want_grads = _reference_gradients(model, data)
    scale = {name: g.abs().max().item() for name, g in want_grads.items()}
    for layout, values in LAYOUTS.items():
        config = policy_config(name, **values)
        with process_group():
            worker = _worker(config)
            batch = shard_batch(data, 1, logprob_strategy(config))
            scores = batch.restore([worker.get_logprobs(batch.data[0], batch.sizes[0])])
            trained, grads = _gradients(worker, config, data)
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores.double(), want_scores, rtol=0, atol=2e-4, msg=layout)
        assert trained.loss == pytest.approx(want_loss, abs=2e-5), layout
        assert set(grads) == set(want_grads)
        for key, grad in grads.items():
            error = (grad.double() - want_grads[key]).abs().max().item()
            assert error <= 2e-4 * max(scale[key], 1e-3), (layout, key, error, scale[key])


def test_scores_use_the_sampling_temperature(tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m")
    data = random_batch()
    model = tiny_model("qwen2").eval()
    ids = data["input_ids"][:1]
    with torch.no_grad():
        logp = torch.log_softmax(model(input_ids=ids).logits / 0.6, dim=-1)
    config = policy_config(name, generation={"temperature": 0.6})
    with process_group():
        worker = _worker(config)
        got = worker.get_logprobs(data.slice(0, 1), [1])
    torch.testing.assert_close(got[0, 1:], logp[0, :-1].gather(-1, ids[0, 1:, None])[:, 0], rtol=0, atol=1e-4)


def test_only_unmasked_positions_are_scored() -> None:
    data = random_batch(rows=4, width=10)
    wanted = all_targets(data)
    for packed in (False, True):
        inputs = build_model_inputs(data, wanted, InputLayout(packed), CPU)
        assert len(inputs.positions_K) == int((data["input_lengths"] - 1).sum())
        tokens = inputs.model_inputs["input_ids"].flatten()
        placed = inputs.scatter(tokens[inputs.positions_K].float())
        want = data["input_ids"][:, :-1].float() * wanted
        assert torch.equal(placed, want)  # position t holds the token before target t + 1
        assert torch.equal(inputs.scatter(inputs.targets_K.float()), data["input_ids"][:, 1:] * wanted.float())


def test_padding_is_trimmed_to_the_longest_row() -> None:
    data = random_batch(rows=4, width=24)
    short = data.select_indices([2, 3])
    longest = int(short["input_lengths"].max())
    inputs = build_model_inputs(short, all_targets(short), InputLayout(packed=False), CPU)
    assert inputs.model_inputs["input_ids"].shape == (2, longest)
    assert "attention_mask" not in inputs.model_inputs
    rounded = build_model_inputs(short, all_targets(short), InputLayout(packed=False, round_to=32), CPU)
    assert rounded.model_inputs["input_ids"].shape == (2, 32)


def test_the_layout_follows_the_configuration(tmp_path) -> None:
    packed = policy_config("m", sequence_packing={"enabled": True}, make_sequence_length_divisible_by=4)
    dynamic = policy_config("m", dynamic_batching={"enabled": True, "sequence_length_round": 32})
    assert input_layout(packed) == InputLayout(packed=True, round_to=4)
    assert input_layout(dynamic) == InputLayout(packed=False, round_to=32)
    packing = {"enabled": True, "sequence_length_round": 6, "microbatch_order": "packer"}
    rounded = policy_config("m", sequence_packing=packing, make_sequence_length_divisible_by=4)
    assert input_layout(rounded) == InputLayout(packed=True, round_to=12)
    strategies = [training_strategy(config) for config in (packed, rounded)]
    assert [(strategy.round_to, strategy.largest_first) for strategy in strategies] == [(4, True), (4, False)]


def test_packing_is_refused_if_sequences_influence_each_other() -> None:
    model = tiny_model("qwen2")
    model.set_attn_implementation(register_varlen_attention())
    verify_packing(model)
    model.set_attn_implementation("eager")
    layer = model.model.layers[0]
    plain = layer.forward
    # A layer that reads its left neighbour, whatever the positions say.
    layer.forward = lambda h, **kw: plain(h + 0.1 * h.roll(1, dims=1), **kw)
    with pytest.raises(ConfigError, match="mixes packed sequences.*enabled=false"):
        verify_packing(model)


def _gemma2() -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            initializer_range=0.3,
        )
    ).eval()


def test_float16_is_refused_for_trained_models(tmp_path) -> None:
    config = policy_config(save_tiny_model(tmp_path, initializer_range=0.05), precision="float16")
    data = random_batch(rows=2, width=8)
    with process_group():
        with pytest.raises(ConfigError, match="precision=float16 loses gradients"):
            DTensorBackend(config, CPU)
        frozen = PolicyWorker(DTensorBackend(config, CPU, init_optimizer=False), config)
        scores = frozen.get_logprobs(data, [2])
    with torch.no_grad():
        want = hf_logprobs(tiny_model("qwen2", initializer_range=0.05).eval(), data)
    torch.testing.assert_close(scores.double(), want, rtol=0, atol=2e-2)
