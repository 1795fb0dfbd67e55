"""SFT, DPO, KTO, GRPO and reward models: packed equals padded equals pair by pair, and equals Hugging Face alone."""

import math

import pytest
import torch
from layout_cases import CPU, compare, expected_gradients, pairs_batch, train_once
from policy_helpers import policy_config, process_group, save_tiny_model, tiny_model
from transformers import (
    AutoModelForSequenceClassification,
    ModernBertDecoderConfig,
    ModernBertDecoderForSequenceClassification,
)

from nemo_rl.config import ClippedPGLossConfig
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.losses.preference import (
    CentredMargin,
    DPOLossConfig,
    DPOLossFn,
    KTOLossConfig,
    KTOLossFn,
    PreferenceLossFn,
)
from nemo_rl.losses.supervised import NLLLossFn
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.build import build_model
from nemo_rl.models.policy.batching import logprob_strategy, shard_batch
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.models.training.interfaces import CheckpointPaths
from nemo_rl.utils.errors import ConfigError

DPO = DPOLossConfig(
    reference_policy_kl_penalty=0.3,
    preference_loss_weight=1.0,
    sft_loss_weight=0.2,
    preference_average_log_probs=False,
    sft_average_log_probs=True,
)
GRPO = ClippedPGLossFn(
    ClippedPGLossConfig.build(
        reference_policy_kl_penalty=0.3,
        reference_policy_kl_type="k1",
        use_on_policy_kl_approximation=True,
        sequence_level_kl_weight=True,
        constant_sample_length=20.0,
    )
)
KTO = KTOLossFn(KTOLossConfig(reference_policy_kl_penalty=0.3, desirable_weight=1.3))


def _logprobs(model, data):
    rows = []
    for row, length in enumerate(data["input_lengths"].tolist()):
        ids = data["input_ids"][row : row + 1, :length]
        logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits.double(), dim=-1)
        scores = logp[0, :-1].gather(-1, ids[0, 1:, None]).squeeze(-1)
        rows.append(torch.nn.functional.pad(scores, (0, data["input_ids"].shape[1] - length)))
    return torch.stack(rows)


@pytest.mark.parametrize("loss_fn", [NLLLossFn(), DPOLossFn(DPO), KTO], ids=["sft", "dpo", "kto"])
def test_language_models_train_alike_in_every_layout(loss_fn, tmp_path):
    name = save_tiny_model(tmp_path / "m", "qwen3")
    data = pairs_batch()
    model = tiny_model("qwen3").double().eval()
    expected = expected_gradients(model, loss_fn, data, _logprobs(model, data))
    compare({}, name, loss_fn, data, expected)


def test_the_weighted_kl_term_is_equal_in_every_layout(tmp_path):
    """A token's weight depends on its whole sequence, wherever that is stored; engine and reference are close."""
    name = save_tiny_model(tmp_path / "m", "qwen3")
    data = pairs_batch()
    model = tiny_model("qwen3").double().eval()
    logprobs = _logprobs(model, data)
    gen = torch.Generator().manual_seed(2)
    for key in ("generation_logprobs", "reference_policy_logprobs"):
        noise = 0.3 * torch.randn(logprobs.shape, generator=gen)
        data[key] = torch.nn.functional.pad(logprobs.detach() + noise, (1, 0)).float()
    data["advantages"] = torch.randn(8, 24, generator=gen)
    compare({}, name, GRPO, data, expected_gradients(model, GRPO, data, logprobs))


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
def test_reward_models_train_alike_in_every_layout_and_load_in_hugging_face(arch, tmp_path):
    """Scores, loss and gradients equal the sequence classifier that Hugging Face loads from our checkpoint."""
    name = save_tiny_model(tmp_path / "m", arch)
    data = pairs_batch()
    loss_fn = PreferenceLossFn(CentredMargin(0.2, 0.05))
    values = {"reward_model_cfg": {"enabled": True}}
    config = policy_config(name, **values)
    with process_group():
        worker = PolicyWorker(DTensorBackend(config, CPU, init_reference_model=False), config)
        worker.backend.save(CheckpointPaths(tmp_path / "saved"))
        batch = shard_batch(data, 1, logprob_strategy(config))
        scores = batch.restore([worker.score(batch.data[0], batch.sizes[0])])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved/model").double().eval()
    assert model.num_labels == 1
    rows = [
        model(input_ids=data["input_ids"][row : row + 1, :length]).logits[0, 0]
        for row, length in enumerate(data["input_lengths"].tolist())
    ]
    own = torch.stack(rows)
    torch.testing.assert_close(scores.double(), own.detach(), rtol=0, atol=1e-5)
    padded = model(input_ids=data["input_ids"]).logits[:, 0]
    torch.testing.assert_close(padded, own, rtol=0, atol=1e-9)
    expected = expected_gradients(model, loss_fn, data, own)
    compare(values, str(tmp_path / "saved/model"), loss_fn, data, expected)


def test_the_new_head_is_the_same_in_every_run(tmp_path):
    name = save_tiny_model(tmp_path / "m")
    config = policy_config(name, reward_model_cfg={"enabled": True})
    heads = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with process_group():
            heads.append(DTensorBackend(config, CPU).model.hf.score.weight.detach().clone())
    assert torch.equal(*heads)
    assert heads[0].abs().max() > 0


def test_an_unsupported_classifier_is_refused(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ours = ModernBertDecoderConfig(vocab_size=60, num_labels=1, pad_token_id=0, **sizes)
    ModernBertDecoderForSequenceClassification(ours).save_pretrained(tmp_path)
    config = policy_config(str(tmp_path), reward_model_cfg={"enabled": True})
    with process_group(), pytest.raises(ConfigError, match="ForSequenceClassification does not score a sequence"):
        build_model(config, seed=0)


def test_dpo_starts_at_ln_2_with_the_models_own_scores(tmp_path):
    name = save_tiny_model(tmp_path / "m")
    data = pairs_batch()
    config = policy_config(name, sequence_packing={"enabled": True, "train_mb_tokens": 70, "logprob_mb_tokens": 64})
    with process_group():
        worker = PolicyWorker(DTensorBackend(config, CPU), config)
        batch = shard_batch(data, 1, logprob_strategy(config))
        parts = [worker.get_reference_policy_logprobs(batch.data[0], batch.sizes[0])]
    data["reference_policy_logprobs"] = batch.restore(parts)
    loss_fn = DPOLossFn(
        DPOLossConfig(
            reference_policy_kl_penalty=0.1,
            preference_loss_weight=1.0,
            sft_loss_weight=0.0,
            preference_average_log_probs=False,
            sft_average_log_probs=False,
        )
    )
    result, _ = train_once(config, loss_fn, data)
    assert result.loss == pytest.approx(math.log(2), abs=1e-6)
