"""Top-k logits and the distillation loss of real models: packed, padded, one by one, on one rank and on two."""

import pytest
import torch
from policy_helpers import (
    VOCAB,
    policy_config,
    process_group,
    random_batch,
    run_ranks,
    save_tiny_model,
    tiny_model,
)

from nemo_rl.config import DistillationLossConfig
from nemo_rl.losses.cross_tokenizer import IN_NO_CLASS, NO_SPAN, NOWHERE, WITHOUT_SLOT, CrossTokenizerLossFn
from nemo_rl.losses.loss_function import AnyLossFunction
from nemo_rl.losses.supervised import LOG_TEACHER_OUTSIDE, DistillationLossFn
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker

CPU = torch.device("cpu")
K = 9
TEMPERATURE = 0.7
LAYOUTS = {
    "one_by_one": {"train_micro_batch_size": 1},
    "padded": {"train_micro_batch_size": 3, "logprob_batch_size": 4, "logprob_chunk_size": 7},
    "padded_rounded": {"train_micro_batch_size": 6, "make_sequence_length_divisible_by": 16},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 50, "logprob_mb_tokens": 64}},
    "dynamic": {
        "dynamic_batching": {
            "enabled": True,
            "train_mb_tokens": 48,
            "logprob_mb_tokens": 64,
            "sequence_length_round": 4,
        }
    },
}
SETTINGS = {"mixed": {"kl_type": "mixed"}, "zeroed": {"kl_type": "mixed", "zero_outside_topk": True}}


def hf_logits(model, data) -> torch.Tensor:
    """Return `[B, T, V]` by the model's own forward, one unpadded row at a time; 0 on padding."""
    width = data["input_ids"].shape[1]
    rows = []
    for ids, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True):
        logits = model(input_ids=ids[None, :length], use_cache=False).logits[0]
        rows.append(torch.nn.functional.pad(logits, (0, 0, 0, width - length)))
    return torch.stack(rows)


def teacher_batch(rows: int = 6):
    """Make a training batch with made-up teacher logits."""
    data = random_batch(rows=rows, width=24)
    gen = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(rows, 24, VOCAB, generator=gen)
    data["teacher_topk_logits"], data["teacher_topk_indices"] = logits.topk(K, dim=-1)
    return data


def topk(worker: PolicyWorker, config, data, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    batch = shard_batch(data, 1, logprob_strategy(config))
    logits, indices = worker.get_topk_logits(batch.data[0], batch.sizes[0], K, **kwargs)
    return batch.restore([logits]), batch.restore([indices])


@pytest.mark.parametrize("arch", ["qwen2", "gemma3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_topk_logits_equal_those_of_the_model(arch, layout, tmp_path) -> None:
    name = save_tiny_model(tmp_path / arch, arch, tie=True)
    data = random_batch(rows=5, width=24)
    with torch.no_grad():
        full = hf_logits(tiny_model(arch, tie=True).eval(), data)
    want = full.topk(K, dim=-1).values
    real = torch.arange(24)[None] < data["input_lengths"][:, None]
    config = policy_config(name, generation={"temperature": 0.5, "top_k": 3}, **LAYOUTS[layout])
    with process_group():
        backend = DTensorBackend(config, CPU, init_optimizer=False, init_reference_model=False)
        assert backend.optimizer is None and backend.scheduler is None
        logits, indices = topk(PolicyWorker(backend, config), config, data)
    assert logits.shape == indices.shape == (5, 24, K)
    assert (logits.dtype, indices.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(logits[real], want[real], rtol=0, atol=2e-4)
    torch.testing.assert_close(full.gather(-1, indices)[real], logits[real], rtol=0, atol=2e-4)
    assert not logits[~real].any() and not indices[~real].any()


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_log_probabilities_at_a_temperature_are_those_of_the_model(layout, tmp_path) -> None:
    data = random_batch(rows=5, width=24)
    with torch.no_grad():
        full = hf_logits(tiny_model("qwen2", tie=True).eval(), data)
    config = policy_config(save_tiny_model(tmp_path / "m", tie=True), **LAYOUTS[layout])
    with process_group():
        worker = PolicyWorker(DTensorBackend(config, CPU, init_optimizer=False), config)
        for vocab_size in (None, 50):
            logprobs, indices = topk(worker, config, data, vocab_size=vocab_size, temperature=TEMPERATURE)
            want = torch.log_softmax(full[..., :vocab_size] / TEMPERATURE, -1)
            real = torch.arange(24)[None] < data["input_lengths"][:, None]
            torch.testing.assert_close(logprobs[real], want.gather(-1, indices)[real], rtol=0, atol=2e-4)


def test_only_ids_of_the_vocabulary_compete(tmp_path) -> None:
    config = policy_config(save_tiny_model(tmp_path / "m"), train_micro_batch_size=5)
    data = random_batch(rows=5, width=24)
    with process_group():
        worker = PolicyWorker(DTensorBackend(config, CPU, init_optimizer=False), config)
        _, indices = topk(worker, config, data)
        _, cut = topk(worker, config, data, vocab_size=50)
    assert indices.max() >= 50 > cut.max()


def reference(model, data, zero: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mixed divergence from full-vocabulary log-softmaxes in float64, and its gradients."""
    model = model.double()
    log_p = torch.log_softmax(hf_logits(model, data)[:, :-1] / TEMPERATURE, dim=-1)
    kept = data["teacher_topk_indices"][:, :-1]
    log_q = torch.log_softmax(data["teacher_topk_logits"][:, :-1].double(), dim=-1)
    on_kept = log_p.gather(-1, kept)
    if zero:
        full_q = torch.full_like(log_p, LOG_TEACHER_OUTSIDE).scatter(-1, kept, log_q)
        reverse = (log_p.exp() * (log_p - full_q)).sum(-1)
    else:
        on_kept = torch.log_softmax(on_kept, dim=-1)
        reverse = (on_kept.exp() * (on_kept - log_q)).sum(-1)
    forward = (log_q.exp() * (log_q - on_kept)).sum(-1)
    mask = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).double()
    loss = ((0.5 * forward + 0.5 * reverse) * mask).sum() / mask.sum()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def loss_of(setting: str) -> AnyLossFunction:
    if setting == "candidates":
        return CANDIDATE_LOSS
    return DistillationLossFn(DistillationLossConfig.build(**SETTINGS[setting]))


def candidate_batch(rows: int = 6):
    """Make a training batch in which spans of one or two tokens have random candidates in random slots."""
    data = random_batch(rows=rows, width=24)
    gen = torch.Generator().manual_seed(4)
    following = torch.nn.functional.pad(data["input_ids"][:, 1:], (0, 1))[..., None]
    ids = torch.rand(rows, 24, VOCAB, generator=gen).argsort(-1)[..., :8]
    starts = torch.arange(24).expand(rows, 24).clone()
    starts[:, 5] = 4
    data["candidate_ids"] = torch.cat([following, ids], -1)
    data["candidate_slots"] = torch.tensor([NOWHERE, 0, 0, 1, 2, 2, IN_NO_CLASS, IN_NO_CLASS, NOWHERE]).expand(
        rows, 24, 9
    )
    data["candidate_log_weights"] = torch.zeros(rows, 24, 9)
    data["teacher_slots"] = torch.log_softmax(torch.randn(rows, 24, 4, generator=gen), -1)[..., :3]
    data["teacher_sorted"] = torch.tensor([0.1, 0.02]).expand(rows, 24, 2)
    data["span_starts"] = starts
    data["span_slots"] = torch.full((rows, 24), NO_SPAN)
    data["span_slots"][:, 4] = WITHOUT_SLOT
    data["span_logprobs"] = torch.full((rows, 24), -3.0)
    return data


def candidate_reference(model, data) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of candidates from full-vocabulary log-softmaxes in float64, and its gradients."""
    model = model.double()
    log_p = torch.log_softmax(hf_logits(model, data)[:, :-1] / TEMPERATURE, dim=-1)
    scores = log_p.gather(-1, data["candidate_ids"][:, :-1])
    count = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
    loss, _ = CANDIDATE_LOSS(scores, data=data, global_valid_seqs=data["sample_mask"].sum(), global_valid_toks=count)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


CANDIDATE_LOSS = CrossTokenizerLossFn(DistillationLossConfig.build(kl_type="jensen_shannon"))


def _train(rank: int, world_size: int, name: str, values: dict, setting: str) -> dict:
    config = policy_config(name, generation={"temperature": TEMPERATURE, "top_k": 2, "top_p": 0.5}, **values)
    worker = PolicyWorker(DTensorBackend(config, CPU), config)
    data = candidate_batch() if setting == "candidates" else teacher_batch()
    batch = shard_batch(data, world_size, training_strategy(config))
    grads: dict[str, torch.Tensor] = {}

    def keep() -> tuple[float, bool]:
        for key, parameter in worker.backend.model.hf.named_parameters():
            grad = parameter.grad
            grads[key] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
        worker.backend.model.zero_grad()
        return 0.0, True

    worker.backend.clip_and_step = keep
    result = worker.train(batch.data[rank], batch.sizes[rank], loss_of(setting), count_valid(data))
    return {"loss": result.loss, "grads": grads, "metrics": result.metrics}


@pytest.mark.parametrize("setting", [*SETTINGS, "candidates"])
def test_every_layout_gives_the_same_loss_and_gradients(setting, tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m", "qwen3", tie=True)
    model = tiny_model("qwen3", tie=True).eval()
    if setting == "candidates":
        want_loss, want_grads = candidate_reference(model, candidate_batch())
    else:
        want_loss, want_grads = reference(model, teacher_batch(), setting == "zeroed")
    scale = {key: grad.abs().max().item() for key, grad in want_grads.items()}
    metrics = []
    for layout, values in LAYOUTS.items():
        with process_group():
            got = _train(0, 1, name, values, setting)
        assert got["loss"] == pytest.approx(want_loss, rel=2e-5), layout
        assert set(got["grads"]) == set(want_grads)
        for key, grad in got["grads"].items():
            error = (grad.double() - want_grads[key]).abs().max().item()
            assert error <= 2e-4 * max(scale[key], 1e-3), (layout, key, error, scale[key])
        metrics.append(got["metrics"])
    for other in metrics[1:]:
        assert other == pytest.approx(metrics[0], rel=1e-4)
    assert 0 < metrics[0]["matched_mass" if setting == "candidates" else "student_topk_mass"] < 1


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_two_ranks_equal_one(layout, tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m", "qwen3", tie=True)
    values = LAYOUTS[layout]
    (one,) = run_ranks(_train, 1, name, values, "zeroed")
    two = run_ranks(_train, 2, name, values, "zeroed")
    assert sum(part["loss"] for part in two) == pytest.approx(one["loss"], rel=2e-5)
    assert sum(part["metrics"]["forward_kl"] for part in two) == pytest.approx(one["metrics"]["forward_kl"], rel=2e-5)
    for key, grad in one["grads"].items():
        for part in two:
            torch.testing.assert_close(part["grads"][key], grad, rtol=1e-3, atol=2e-4 * grad.abs().max().item())
