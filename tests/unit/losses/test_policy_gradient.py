"""Every option of the policy-gradient loss against a loop over plain floats.

The reference below shares no code with the library. Stop-gradients are modelled by a second copy of
the log-probabilities, `frozen`, which finite differences leave alone.
"""

import math
import pickle

import pytest
import torch
from loss_batches import denominators, random_batch

from nemo_rl.config import ClippedPGLossConfig
from nemo_rl.losses.invariance import check_invariance
from nemo_rl.losses.loss_function import LossType
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.fast

B, T = 6, 7
SAME = (
    {"ppo", "kl_unclamped"},
    {"kl_off", "kl_in_reward"},
    {"forced_on_policy", "forced_on_policy_reinforce"},
    {"reinforce", "reinforce_dual_clip"},
)
OPTIONS = {
    "ppo": {},
    "clip_higher": {"ratio_clip_min": 0.1, "ratio_clip_max": 0.4},
    "dual_clip": {"ratio_clip_c": 1.3},
    "reinforce": {"disable_ppo_ratio": True},
    "cispo": {"use_cispo": True, "ratio_clip_min": 0.5, "ratio_clip_max": 0.3},
    "gspo": {"sequence_level_importance_ratios": True, "token_level_loss": False},
    "cispo_cap_below_one": {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": -0.2},
    "constant_length": {"constant_sample_length": 5.0},
    "sequence_loss": {"token_level_loss": False},
    "forced_on_policy": {"force_on_policy_ratio": True},
    "kl_off": {"reference_policy_kl_penalty": 0.0},
    "kl_in_reward": {"use_kl_in_reward": True},
    "k1": {"reference_policy_kl_type": "k1"},
    "k2": {"reference_policy_kl_type": "k2"},
    "k3_clamped": {"kl_input_clamp_value": 0.5, "kl_output_clamp_value": 0.1},
    "k1_clamped": {"reference_policy_kl_type": "k1", "kl_output_clamp_value": 0.3},
    "kl_unclamped": {"kl_input_clamp_value": None, "kl_output_clamp_value": None},
    "kl_input_clamped": {"kl_input_clamp_value": 0.5, "kl_output_clamp_value": None},
    "k1_input_clamped_on_policy": {
        "reference_policy_kl_type": "k1",
        "kl_input_clamp_value": 0.5,
        "kl_output_clamp_value": None,
        "use_on_policy_kl_approximation": True,
    },
    "kl_negative": {"reference_policy_kl_penalty": -0.3},
    "no_lower_clip": {"ratio_clip_min": 1.5},
    "kl_on_policy": {"use_on_policy_kl_approximation": True},
    "kl_on_policy_clamped": {"use_on_policy_kl_approximation": True, "kl_output_clamp_value": 0.2},
    "kl_sequence": {"token_level_loss": False, "use_on_policy_kl_approximation": True},
    "kl_sequence_weight": {"sequence_level_kl_weight": True},
    "kl_on_policy_sequence_weight": {"sequence_level_kl_weight": True, "use_on_policy_kl_approximation": True},
    "gspo_kl_sequence_weight": {
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
        "sequence_level_kl_weight": True,
        "use_on_policy_kl_approximation": True,
    },
    "is": {"use_importance_sampling_correction": True},
    "tis": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_ratio": 1.1,
        "truncated_importance_sampling_type": "tis",
    },
    "tis_with_min": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_ratio": 1.1,
        "truncated_importance_sampling_ratio_min": 0.85,
        "truncated_importance_sampling_type": "tis",
    },
    "icepop": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_ratio": 1.3,
        "truncated_importance_sampling_ratio_min": 0.8,
        "truncated_importance_sampling_type": "icepop",
    },
    "seq_mask_tis": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_ratio": 1.05,
        "truncated_importance_sampling_ratio_min": 0.9,
        "truncated_importance_sampling_type": "seq-mask-tis",
    },
    "gspo_is": {
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
        "use_importance_sampling_correction": True,
    },
    "gspo_tis": {
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_ratio": 0.8,
        "truncated_importance_sampling_type": "tis",
    },
    "cispo_tis": {
        "use_cispo": True,
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_ratio": 1.1,
        "truncated_importance_sampling_type": "tis",
    },
    "forced_on_policy_tis": {
        "force_on_policy_ratio": True,
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_ratio": 1.1,
        "truncated_importance_sampling_type": "tis",
    },
    "forced_on_policy_reinforce": {"force_on_policy_ratio": True, "disable_ppo_ratio": True},
    "forced_on_policy_gspo": {
        "force_on_policy_ratio": True,
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
    },
    "reinforce_dual_clip": {"disable_ppo_ratio": True, "ratio_clip_c": 1.3},
    "reinforce_sequence_is": {
        "disable_ppo_ratio": True,
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
        "use_importance_sampling_correction": True,
    },
    "positive_nll": {"positive_example_nll_weight": 0.4},
    "positive_nll_sequence_loss": {"positive_example_nll_weight": 0.4, "token_level_loss": False},
}


def make_config(**options):
    return ClippedPGLossConfig.build(**({"reference_policy_kl_penalty": 0.7} | options))


def off_policy_batch(seed=3):
    """Make a batch so far off-policy that every clip acts (a test below checks it); some rows and tokens are masked."""
    gen = torch.Generator().manual_seed(seed)

    def noise(scale):
        return scale * torch.randn(B, T, generator=gen, dtype=torch.float64)

    generation = -0.1 - 2 * torch.rand(B, T, generator=gen, dtype=torch.float64)
    prev = generation + noise(0.25)
    current = prev + noise(0.35)
    _, data = random_batch(B, T, seed=seed, masked_rows=[2])
    data["token_mask"][3] = 0  # a sample without unmasked tokens
    data |= {
        "input_ids": torch.zeros(B, T, dtype=torch.int64),
        "advantages": noise(1.0),
        "generation_logprobs": generation,
        "prev_logprobs": prev,
        "reference_policy_logprobs": current + noise(0.8),
    }
    return current[:, 1:].clone(), data


def call(cfg, logprobs, data):
    return ClippedPGLossFn(cfg)(logprobs, data=data, **denominators(data))


def clamp(x, low, high):
    return min(max(x, low), high)


def as_floats(data):
    """Return the batch as lists, and its denominators: the loops below read single values, slowly from tensors."""
    return {name: tensor.tolist() for name, tensor in data.items()} | denominators(data)


def reference_loss(lp, frozen, data, cfg, rows=range(B)):
    """Compute the loss of some rows by loops over floats.

    Returns:
        Loss, mean KL, share of tokens or sequences out of bounds.
    """
    total = kl_total = oob_total = 0.0
    for b in rows:
        if not data["sample_mask"][b]:
            continue
        tokens = [t for t in range(T - 1) if data["token_mask"][b][t + 1]]
        if not tokens:
            continue
        now = {t: lp[b][t] for t in tokens}
        stop = {t: frozen[b][t] for t in tokens}
        engine = {t: data["generation_logprobs"][b][t + 1] for t in tokens}
        on_policy = cfg.force_on_policy_ratio or "prev_logprobs" not in data
        prev = stop if on_policy else {t: data["prev_logprobs"][b][t + 1] for t in tokens}
        n = len(tokens)

        seq_ratio = math.exp(sum(now[t] - prev[t] for t in tokens) / n)
        seq_weight = math.exp(sum(prev[t] - engine[t] for t in tokens))
        geometric = math.exp(sum(prev[t] - engine[t] for t in tokens) / n)
        high = cfg.truncated_importance_sampling_ratio
        low = cfg.truncated_importance_sampling_ratio_min or 0.0

        surrogate = kl = num_out = 0.0
        sampled_by = engine if cfg.use_on_policy_kl_approximation else stop
        clamp_at = math.inf if cfg.kl_input_clamp_value is None else cfg.kl_input_clamp_value
        distance = {t: data["reference_policy_logprobs"][b][t + 1] - stop[t] for t in tokens}
        moving = {t: stop[t] if abs(distance[t]) > clamp_at else now[t] for t in tokens}
        kl_weights = {t: math.exp(moving[t] - sampled_by[t]) for t in tokens}
        if cfg.sequence_level_kl_weight:
            kl_weights = dict.fromkeys(tokens, math.prod(kl_weights.values()) ** (1 / n))
        for t in tokens:
            a = data["advantages"][b][t + 1]
            by_sequence = cfg.sequence_level_importance_ratios and not cfg.force_on_policy_ratio
            r = seq_ratio if by_sequence else math.exp(now[t] - prev[t])
            lo, hi = 1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max
            if cfg.disable_ppo_ratio and not cfg.force_on_policy_ratio:
                value = -a * now[t]
            elif cfg.use_cispo:
                fixed = math.exp(stop[t] - prev[t])
                value = -clamp(fixed, lo, hi) * a * now[t]
            else:
                objective = min(r * a, clamp(r, lo, hi) * a)
                if cfg.ratio_clip_c is not None and a < 0:
                    objective = max(objective, cfg.ratio_clip_c * a)
                value = -objective
            if cfg.use_importance_sampling_correction:
                w = seq_weight if cfg.sequence_level_importance_ratios else math.exp(prev[t] - engine[t])
                kind = cfg.truncated_importance_sampling_type
                measured = geometric if kind == "seq-mask-tis" else w
                out = kind is not None and not low <= measured <= high
                num_out += out
                if out:
                    w = clamp(w, low, high) if kind == "tis" else 0.0
                value *= w
            surrogate += value
            is_positive = data["positive_examples"][b] if "positive_examples" in data else a > 0
            surrogate -= cfg.positive_example_nll_weight * bool(is_positive) * now[t]

            if cfg.reference_policy_kl_penalty and not cfg.use_kl_in_reward:
                x = data["reference_policy_logprobs"][b][t + 1] - now[t]
                if cfg.kl_input_clamp_value is not None:
                    x = clamp(x, -cfg.kl_input_clamp_value, cfg.kl_input_clamp_value)
                kinds = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}
                value = kl_weights[t] * kinds[cfg.reference_policy_kl_type]
                if cfg.kl_output_clamp_value is not None:
                    value = clamp(value, -cfg.kl_output_clamp_value, cfg.kl_output_clamp_value)
                kl += value
        denominator = data["global_valid_toks"] if cfg.token_level_loss else n * data["global_valid_seqs"]
        if cfg.constant_sample_length:
            denominator = cfg.constant_sample_length * data["global_valid_seqs"]
        scale = 1 / denominator
        by_sequence = cfg.truncated_importance_sampling_type == "seq-mask-tis"
        oob_total += num_out / (n * data["global_valid_seqs"] if by_sequence else data["global_valid_toks"])
        total += scale * surrogate
        kl_total += scale * kl
    loss = total + cfg.reference_policy_kl_penalty * kl_total
    return loss, kl_total, oob_total


def reference_gradient(logprobs, data, cfg, step=1e-6):
    """Return central differences of the reference loss; a value changes the loss of its own row only."""
    frozen = logprobs.tolist()
    gradient = torch.zeros_like(logprobs)
    for b in range(B):
        for t in range(T - 1):
            values = []
            for sign in (1, -1):
                moved = logprobs.tolist()
                moved[b][t] += sign * step
                values.append(reference_loss(moved, frozen, data, cfg, [b])[0])
            gradient[b, t] = (values[0] - values[1]) / (2 * step)
    return gradient


@pytest.mark.parametrize("with_prev", [True, False], ids=["prev", "no_prev"])
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradient_equal_the_reference(name, with_prev):
    cfg = make_config(**OPTIONS[name])
    logprobs, data = off_policy_batch()
    if not with_prev:
        del data["prev_logprobs"]
    logprobs.requires_grad_(True)
    loss, metrics = call(cfg, logprobs, data)
    loss.backward()
    floats = as_floats(data)
    expected, kl, oob = reference_loss(logprobs.tolist(), logprobs.tolist(), floats, cfg)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert float(metrics["kl_penalty"]) == pytest.approx(kl, rel=1e-12)
    assert float(metrics["is_oob_ratio"]) == pytest.approx(oob, rel=1e-12)
    assert float(metrics["loss"]) == loss.item()
    numeric = reference_gradient(logprobs.detach(), floats, cfg)
    torch.testing.assert_close(logprobs.grad, numeric, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_loss_does_not_depend_on_the_batch_split(name):
    logprobs, data = off_policy_batch(seed=1)
    check_invariance(ClippedPGLossFn(make_config(**OPTIONS[name])), logprobs, data)


@pytest.mark.parametrize(
    "name", ["ppo", "reinforce", "cispo", "gspo_is", "kl_on_policy", "seq_mask_tis", "positive_nll"]
)
def test_the_loss_without_earlier_scores_does_not_depend_on_the_batch_split(name):
    logprobs, data = off_policy_batch(seed=1)
    del data["prev_logprobs"]
    check_invariance(ClippedPGLossFn(make_config(**OPTIONS[name])), logprobs, data)


def test_different_options_give_different_losses():
    """Guard the test batch: each option must change the loss or the gradient."""
    logprobs, data = off_policy_batch()
    seen = {}
    for name, options in OPTIONS.items():
        leaf = logprobs.clone().requires_grad_(True)
        loss, _ = call(make_config(**options), leaf, data)
        loss.backward()
        result = torch.cat([loss.detach().reshape(1), leaf.grad.flatten()])
        for other, seen_result in seen.items():
            is_same = {name, other} in SAME
            assert torch.allclose(seen_result, result, rtol=1e-9, atol=0) == is_same, (name, other)
        seen[name] = result


def test_metrics_equal_a_hand_computed_case():
    """One sample has two unmasked tokens and a masked one."""
    p, q, now = [0.5, 0.25], [0.4, 0.5], [0.6, 0.25]

    def row(values):
        return torch.tensor([[0.0, *[math.log(v) for v in values], -3.0]], dtype=torch.float64)

    data = {
        "advantages": torch.ones(1, 4, dtype=torch.float64),
        "prev_logprobs": row(p),
        "generation_logprobs": row(q),
        "token_mask": torch.tensor([[0.0, 1, 1, 0]]),
        "sample_mask": torch.ones(1),
    }
    cfg = make_config(reference_policy_kl_penalty=0.0)
    loss, metrics = call(cfg, row(now)[:, 1:], data)

    def k3(a, b):
        return b / a - 1 - math.log(b / a)

    mix = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    expected = {
        "loss": -(1.2 + 1.0) / 2,
        "probs_ratio": (1.2 + 1.0) / 2,
        "probs_ratio_min": 1.0,
        "probs_ratio_max": 1.2,
        "probs_ratio_clamped": (1.2 + 1.0) / 2,
        "probs_ratio_clamped_min": 1.0,
        "probs_ratio_clamped_max": 1.2,
        "kl_penalty": 0.0,
        "token_mult_prob_error": (0.5 / 0.4 + 0.5 / 0.25) / 2,
        "gen_kl_error": (k3(0.4, 0.5) + k3(0.5, 0.25)) / 2,
        "policy_kl_error": (k3(0.5, 0.4) + k3(0.25, 0.5)) / 2,
        "js_divergence_error": sum((k3(m, a) + k3(m, b)) / 2 for a, b, m in zip(p, q, mix, strict=True)) / 2,
        "sampling_importance_ratio": (0.5 / 0.4 + 0.25 / 0.5) / 2,
        "is_oob_ratio": 0.0,
        "approx_entropy": -(0.6 / 0.4 * math.log(0.6) + 0.25 / 0.5 * math.log(0.25)) / 2,
        "num_valid_samples": 1.0,
        "num_filtered_tokens": 0.0,
    }
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(expected, rel=1e-9)


def test_identical_policies_show_no_mismatch():
    logprobs, data = off_policy_batch()
    data["prev_logprobs"] = data["generation_logprobs"]
    _, metrics = call(make_config(), data["generation_logprobs"][:, 1:], data)
    for name in ("gen_kl_error", "policy_kl_error", "js_divergence_error"):
        assert float(metrics[name]) == pytest.approx(0.0, abs=1e-15)
    for name in ("token_mult_prob_error", "sampling_importance_ratio", "probs_ratio"):
        assert float(metrics[name]) == pytest.approx(1.0, rel=1e-15)


@pytest.mark.parametrize("source", ["current", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs"])
@pytest.mark.parametrize("name", ["ppo", "gspo", "reinforce", "seq_mask_tis", "kl_on_policy"])
def test_tokens_with_infinite_log_probs_are_dropped_and_counted(name, source):
    """-inf on a token equals masking that token, at unchanged denominators."""
    cfg = make_config(**OPTIONS[name])
    logprobs, data = off_policy_batch()
    data["token_mask"][0, 3] = data["token_mask"][1, 2] = 1
    den = denominators(data)
    if source == "current":
        logprobs[0, 2] = logprobs[1, 1] = -torch.inf
    else:
        data[source][0, 3] = data[source][1, 2] = -torch.inf
    leaf = logprobs.clone().requires_grad_(True)
    loss, metrics = ClippedPGLossFn(cfg)(leaf, data=data, **den)
    loss.backward()
    assert float(metrics["num_filtered_tokens"]) == 2
    assert leaf.grad[0, 2] == leaf.grad[1, 1] == 0
    assert all(math.isfinite(float(value)) for value in metrics.values())

    masked = data | {"token_mask": data["token_mask"].clone()}
    masked["token_mask"][0, 3] = masked["token_mask"][1, 2] = 0
    leaf_masked = logprobs.clone().requires_grad_(True)
    loss_masked, _ = ClippedPGLossFn(cfg)(leaf_masked, data=masked, **den)
    loss_masked.backward()
    if cfg.token_level_loss:  # the same denominator
        assert loss.item() == pytest.approx(loss_masked.item(), rel=1e-12)
        torch.testing.assert_close(leaf.grad, leaf_masked.grad)
    else:  # the dropped token stays in its own sample's count
        rows = [0, 1]
        counts = data["token_mask"][rows, 1:].sum(-1, keepdim=True)
        torch.testing.assert_close(leaf.grad[rows] * counts, leaf_masked.grad[rows] * (counts - 1))
        torch.testing.assert_close(leaf.grad[2:], leaf_masked.grad[2:])


def test_nan_in_padding_is_never_read():
    logprobs, data = off_policy_batch()
    clean, _ = call(make_config(), logprobs, data)
    hole = data["token_mask"] == 0
    for name in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "advantages"):
        data[name] = torch.where(hole, torch.nan, data[name])
    leaf = torch.where(hole[:, 1:], torch.nan, logprobs).requires_grad_(True)
    loss, _ = call(make_config(), leaf, data)
    loss.backward()
    assert loss.item() == pytest.approx(clean.item(), rel=1e-12)
    assert torch.equal(leaf.grad[hole[:, 1:]], torch.zeros(int(hole[:, 1:].sum()), dtype=torch.float64))


def test_a_nan_at_a_counted_token_reaches_the_loss():
    logprobs, data = off_policy_batch()
    b, t = torch.nonzero(data["token_mask"][:, 1:] * data["sample_mask"][:, None])[0].tolist()
    logprobs[b, t] = torch.nan
    assert math.isnan(call(make_config(), logprobs, data)[0].item())


def test_missing_prev_logprobs_give_a_ratio_of_one_with_a_gradient():
    logprobs, data = off_policy_batch()
    del data["prev_logprobs"]
    cfg = make_config(reference_policy_kl_penalty=0.0)
    leaf = logprobs.requires_grad_(True)
    loss, metrics = call(cfg, leaf, data)
    loss.backward()
    weights = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    expected = -data["advantages"][:, 1:] * weights / weights.sum()
    torch.testing.assert_close(leaf.grad, expected)
    assert float(metrics["probs_ratio_min"]) == float(metrics["probs_ratio_max"]) == 1.0


def test_an_empty_microbatch_contributes_nothing():
    logprobs, data = off_policy_batch()
    data["sample_mask"] = torch.zeros(B, dtype=torch.float64)
    leaf = logprobs.requires_grad_(True)
    loss, metrics = ClippedPGLossFn(make_config())(leaf, data=data, global_valid_seqs=5, global_valid_toks=17)
    loss.backward()
    assert loss.item() == 0 and not leaf.grad.any()
    assert float(metrics["probs_ratio_min"]) == math.inf
    assert float(metrics["probs_ratio_max"]) == -math.inf


def test_float32_batches_with_extreme_ratios_stay_finite():
    logprobs, data = off_policy_batch()
    data = {k: v.float() if v.is_floating_point() else v for k, v in data.items()}
    data["prev_logprobs"] = data["prev_logprobs"] - 200.0
    leaf = logprobs.float().requires_grad_(True)
    loss, metrics = call(make_config(use_importance_sampling_correction=True), leaf, data)
    loss.backward()
    assert loss.dtype == torch.float32 and torch.isfinite(loss)
    assert torch.isfinite(leaf.grad).all()
    infinite = {name for name, value in metrics.items() if not math.isfinite(float(value))}
    assert infinite == {"token_mult_prob_error", "policy_kl_error"}  # e^200 is beyond float32


def test_the_loss_declares_the_inputs_that_it_needs():
    assert ClippedPGLossFn(make_config()).loss_type is LossType.TOKEN_LEVEL
    assert ClippedPGLossFn(make_config(token_level_loss=False)).loss_type is LossType.SEQUENCE_LEVEL
    assert ClippedPGLossFn(make_config(constant_sample_length=9)).loss_type is LossType.SEQUENCE_LEVEL
    assert ClippedPGLossFn(make_config()).needs_reference
    assert not ClippedPGLossFn(make_config(reference_policy_kl_penalty=0.0)).needs_reference
    assert not ClippedPGLossFn(make_config(use_kl_in_reward=True)).needs_reference


@pytest.mark.parametrize("name", OPTIONS)
def test_losses_can_be_pickled(name):
    loss_fn = ClippedPGLossFn(make_config(**OPTIONS[name]))
    logprobs, data = off_policy_batch()
    copied = pickle.loads(pickle.dumps(loss_fn))
    expected, _ = loss_fn(logprobs, data=data, **denominators(data))
    assert copied(logprobs, data=data, **denominators(data))[0] == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_cispo": True, "disable_ppo_ratio": True}, "use_cispo=true shapes"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "ratio_clip_c"),
        ({"use_cispo": True, "force_on_policy_ratio": True}, "use_cispo"),
        ({"use_cispo": True, "token_level_loss": False}, "token_level_loss=true"),
        ({"sequence_level_importance_ratios": True}, "token_level_loss=false"),
        ({"constant_sample_length": 9, "token_level_loss": False}, "token_level_loss=true"),
        ({"ratio_clip_max": -0.5}, "use_cispo=true"),
        ({"ratio_clip_max": -0.5, "use_cispo": True}, "below the lower one"),
        ({"truncated_importance_sampling_ratio": 2.0}, "use_importance_sampling_correction"),
        (
            {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 2.0},
            "truncated_importance_sampling_type, which is null",
        ),
        (
            {
                "sequence_level_importance_ratios": True,
                "token_level_loss": False,
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_ratio": 1.05,
                "truncated_importance_sampling_ratio_min": 0.9,
                "truncated_importance_sampling_type": "seq-mask-tis",
            },
            "gives a sequence one weight",
        ),
        (
            {
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_type": "icepop",
            },
            "the upper bound",
        ),
        (
            {
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_ratio_min": 0.5,
            },
            "which is null",
        ),
        (
            {
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_type": "icepop",
                "truncated_importance_sampling_ratio": 1.0,
                "truncated_importance_sampling_ratio_min": 2.0,
            },
            "must not exceed",
        ),
    ],
)
def test_contradictory_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        ClippedPGLossFn(make_config(**options))
