"""The policy worker on one GPU: packed flash attention against padded attention and Hugging Face."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "models"))
from policy_helpers import (
    ARCHITECTURES,
    WeightedNLL,
    free_port,
    hf_logprobs,
    policy_config,
    random_batch,
    save_tiny_model,
    tiny_model,
)

from nemo_rl.config import DistillationLossConfig
from nemo_rl.distributed.ranks.process_group import destroy_process_group, init_process_group
from nemo_rl.host.device import device_for
from nemo_rl.losses.supervised import DistillationLossFn
from nemo_rl.models.attention import flash_attn
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64}}
# bfloat16 keeps 8 bits: logits of a few units are off by a few hundredths.
BF16_TOLERANCE = 0.15


@pytest.fixture
def gpu(monkeypatch):
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    device = device_for(uses_gpu=True)
    torch_device = device.activate()
    init_process_group(device, timeout_s=60)
    yield torch_device
    destroy_process_group()


def _scores(config, device, data):
    worker = PolicyWorker(DTensorBackend(config, device), config)
    batch = shard_batch(data, 1, logprob_strategy(config))
    return worker, batch.restore([worker.get_logprobs(batch.data[0], batch.sizes[0])])


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_packed_and_padded_scores_equal_hugging_face(arch, precision, gpu, tmp_path, monkeypatch) -> None:
    calls: list[str] = []
    flash = flash_attn.torch_varlen
    monkeypatch.setattr(flash_attn, "torch_varlen", lambda *a: (calls.append("flash"), flash(*a))[1])
    name = save_tiny_model(tmp_path / "m", arch, initializer_range=0.1)
    data = random_batch(rows=6, width=24)
    with torch.no_grad():
        want = hf_logprobs(tiny_model(arch, initializer_range=0.1).double().eval(), data)
    tolerance = BF16_TOLERANCE if precision == "bfloat16" else 1e-3
    _, padded = _scores(policy_config(name, precision=precision), gpu, data)
    has_window = arch == "gemma3"
    assert bool(calls) is (precision == "bfloat16" and has_window), "plain causal rows are one call of sdpa"
    calls.clear()
    _, packed = _scores(policy_config(name, precision=precision, **PACKED), gpu, data)
    assert bool(calls) is (precision == "bfloat16"), "flash attention serves half precision"
    torch.testing.assert_close(padded.double(), want, rtol=0, atol=tolerance)
    torch.testing.assert_close(packed.double(), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("arch", ["qwen3", "gemma3"])
def test_packed_and_padded_gradients_agree_in_bfloat16(arch, gpu, tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m", arch, initializer_range=0.1)
    data = random_batch(rows=6, width=24)
    found = []
    for layout in ({}, PACKED):
        config = policy_config(name, precision="bfloat16", **layout)
        worker = PolicyWorker(DTensorBackend(config, gpu), config)
        kept = {}

        def keep(worker=worker, kept=kept):
            for key, parameter in worker.backend.model.hf.named_parameters():
                kept[key] = parameter.grad.full_tensor().float()
            return 0.0, True

        worker.backend.clip_and_step = keep
        batch = shard_batch(data, 1, training_strategy(config))
        worker.train(batch.data[0], batch.sizes[0], WeightedNLL(), count_valid(data))
        found.append(kept)
    for key, padded in found[0].items():
        error = (found[1][key] - padded).norm() / padded.norm()
        assert error < 0.1, (key, error)


def test_a_teacher_is_distilled_in_bfloat16(gpu, tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m", "qwen3", initializer_range=0.1)
    config = policy_config(name, precision="bfloat16", **PACKED)
    data = random_batch(rows=6, width=24)
    teacher = PolicyWorker(DTensorBackend(config, gpu, init_optimizer=False, init_reference_model=False), config)
    scored = shard_batch(data, 1, logprob_strategy(config))
    logits, indices = teacher.get_topk_logits(scored.data[0], scored.sizes[0], 8)
    data["teacher_topk_logits"], data["teacher_topk_indices"] = scored.restore([logits]), scored.restore([indices])
    ids = data["input_ids"][:1].to(gpu)
    with torch.no_grad():
        want = tiny_model("qwen3", initializer_range=0.1).to(gpu).eval()(input_ids=ids).logits[0].topk(8).values.cpu()
    torch.testing.assert_close(data["teacher_topk_logits"][0], want, rtol=0, atol=BF16_TOLERANCE)

    other = policy_config(
        save_tiny_model(tmp_path / "s", "qwen3", initializer_range=0.2), precision="bfloat16", **PACKED
    )
    student = PolicyWorker(DTensorBackend(other, gpu), other)
    batch = shard_batch(data, 1, training_strategy(other))
    loss_fn = DistillationLossFn(DistillationLossConfig.build(zero_outside_topk=True))
    losses = [student.train(batch.data[0], batch.sizes[0], loss_fn, count_valid(data)).loss for _ in range(4)]
    assert losses[-1] < 0.9 * losses[0]


def test_training_in_bfloat16_learns_and_saves_float32_weights(gpu, tmp_path) -> None:
    config = policy_config(save_tiny_model(tmp_path / "m", "qwen3"), precision="bfloat16", **PACKED)
    data = random_batch(rows=6)
    worker, before = _scores(config, gpu, data)
    batch = shard_batch(data, 1, training_strategy(config))
    results = [worker.train(batch.data[0], batch.sizes[0], WeightedNLL(), count_valid(data)) for _ in range(3)]
    assert results[-1].loss < results[0].loss
    worker.save_checkpoint(str(tmp_path / "w"), str(tmp_path / "o"))
    saved = {key: tensor.clone() for key, tensor in worker.iterate_weights()}
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    worker.train(batch.data[0], batch.sizes[0], WeightedNLL(), count_valid(data))
    worker.load_checkpoint(str(tmp_path / "w"), str(tmp_path / "o"))
    assert all(torch.equal(saved[key], tensor) for key, tensor in worker.iterate_weights())
    reference = worker.get_reference_policy_logprobs(*_logprob_batch(config, data))
    first = shard_batch(data, 1, logprob_strategy(config)).restore([reference])
    torch.testing.assert_close(first, before, rtol=0, atol=1e-6)


def _logprob_batch(config, data):
    batch = shard_batch(data, 1, logprob_strategy(config))
    return batch.data[0], batch.sizes[0]


def test_offloaded_parameters_are_trained(gpu, tmp_path) -> None:
    values = {"precision": "bfloat16", "dtensor_cfg": {"cpu_offload": True}, "max_grad_norm": 0.5}
    config = policy_config(save_tiny_model(tmp_path / "m", "llama"), **values)
    data = random_batch(rows=6)
    worker, _ = _scores(config, gpu, data)
    batch = shard_batch(data, 1, training_strategy(config))
    results = [worker.train(batch.data[0], batch.sizes[0], WeightedNLL(), count_valid(data)) for _ in range(3)]
    assert results[-1].loss < results[0].loss
    assert all(tensor.device.type == gpu.type for _, tensor in worker.iterate_weights())


def test_sharing_the_gpu_in_turns_changes_no_number_and_frees_its_memory(gpu, tmp_path) -> None:
    """Optimizer state and the weights of a frozen model move to page-locked memory and back."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4096}
    name = save_tiny_model(tmp_path / "m", "qwen3", initializer_range=0.02, **shape)
    config = policy_config(name, precision="bfloat16", **PACKED)
    data = random_batch(rows=6, width=24)
    teacher = PolicyWorker(DTensorBackend(config, gpu, init_optimizer=False, init_reference_model=False), config)
    want = teacher.get_topk_logits(*_logprob_batch(config, data), 5)
    policies = [PolicyWorker(DTensorBackend(config, gpu), config) for _ in range(2)]
    batch = shard_batch(data, 1, training_strategy(config))
    for _ in range(3):
        losses = [w.train(batch.data[0], batch.sizes[0], WeightedNLL(), count_valid(data)).loss for w in policies]
        assert losses[0] == losses[1]
        awake = torch.cuda.memory_allocated()
        policies[0].move_optimizer_state(to_host=True)
        teacher.move_weights(to_host=True)
        freed = awake - torch.cuda.memory_allocated()
        numbers = sum(parameter.numel() for parameter in teacher.backend.model.parameters())
        assert freed > 0.95 * numbers * (8 + 2), "two moments in float32, and weights in bfloat16"
        moments = [v for s in policies[0].backend.optimizer.state.values() for v in s.values() if v.dim()]
        assert all(moment.to_local().is_pinned() for moment in moments)
        policies[0].move_optimizer_state(to_host=False)
        teacher.move_weights(to_host=False)
        got = teacher.get_topk_logits(*_logprob_batch(config, data), 5)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert policies[0].backend.optimizer.param_groups[0]["fused"] is True


def test_a_checkpoint_is_written_while_the_gpu_trains(gpu, tmp_path) -> None:
    config = policy_config(save_tiny_model(tmp_path / "m", "qwen3"), precision="bfloat16", **PACKED)
    data = random_batch(rows=6)
    worker = PolicyWorker(DTensorBackend(config, gpu), config)
    batch = shard_batch(data, 1, training_strategy(config))
    worker.train(batch.data[0], batch.sizes[0], WeightedNLL(), count_valid(data))
    saved = {key: tensor.clone() for key, tensor in worker.iterate_weights()}
    worker.save_checkpoint(str(tmp_path / "w"), str(tmp_path / "o"), background=True)
    worker.train(batch.data[0], batch.sizes[0], WeightedNLL(), count_valid(data))
    worker.finish_checkpoint()
    worker.load_checkpoint(str(tmp_path / "w"), str(tmp_path / "o"))
    assert all(torch.equal(saved[key], tensor) for key, tensor in worker.iterate_weights())


def test_vocabulary_statistics_are_compiled_and_correct(gpu) -> None:
    from nemo_rl.distributed import parallel_logprobs
    from nemo_rl.distributed.parallel_logprobs import fusion

    hidden = torch.randn(3000, 64, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(5001, 64, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 5001, (3000,), device=gpu)
    got, entropy = parallel_logprobs.token_logprobs(hidden, weight, targets)
    grads = torch.autograd.grad((got + 0.1 * entropy).sum(), [hidden, weight])
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logp = (wide[0] @ wide[1].t()).log_softmax(-1)
    want = logp.gather(-1, targets[:, None]).squeeze(-1)
    want_grads = torch.autograd.grad((want - 0.1 * (logp.exp() * logp).sum(-1)).sum(), wide)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-3)
    for grad, wanted in zip(grads, want_grads, strict=True):
        assert (grad.double() - wanted).norm() / wanted.norm() < 0.02
    assert not fusion._uncompilable, "else it says why in the log"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_take_a_fraction_of_the_memory_of_full_logits(gpu, temperature) -> None:
    """4 rows of 4096 tokens and 32768 words, forward and backward, in bfloat16."""
    from nemo_rl.distributed.parallel_logprobs import SamplingDensity, token_logprobs

    hidden, weight = (torch.randn(n, 256, device=gpu, dtype=torch.bfloat16).requires_grad_() for n in (16384, 32768))
    targets = torch.zeros(16384, dtype=torch.int64, device=gpu)

    def full_way() -> torch.Tensor:
        logits = (hidden @ weight.t()).float() / temperature
        return torch.log_softmax(logits, -1).gather(-1, targets[:, None])

    def in_chunks() -> torch.Tensor:
        return token_logprobs(hidden, weight, targets, density=SamplingDensity(temperature))[0]

    peaks = []
    for way in (full_way, in_chunks):
        way().sum().backward()  # compiles, and computes the gradients
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        way().sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    full, chunked = peaks
    assert chunked < full / 5, peaks
