"""A model whose classes are in its folder is trained, sampled and exported like one of transformers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_helpers import PROMPTS, answered, ask, make_settings, reference_logprobs
from own_model import write_own_model
from policy_helpers import WeightedNLL, hf_logprobs_with_grad, policy_config, process_group, random_batch
from tiny_models import make_char_tokenizer
from transformers import AutoModelForCausalLM

from nemo_rl.config.rules.models import trust_models
from nemo_rl.files import trusted_code
from nemo_rl.files.trusted_code import code_files
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.training_backend import DTensorTraining
from nemo_rl.models.generation.hf import HfEngine
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.models.policy.batching import count_valid, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.models.training.interfaces import CheckpointPaths

CPU = torch.device("cpu")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    """Return the folder of a trusted model, and the model."""
    monkeypatch.setattr(trusted_code, "_TRUSTED", set())
    folder = tmp_path / "own"
    model = write_own_model(folder, tmp_path / "RAN")
    make_char_tokenizer().save_pretrained(folder)
    trust_models([("policy.model_name", "policy.tokenizer.name", policy_config(str(folder), trust_remote_code=True))])
    return folder, model


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_gradients_equal_those_of_the_model_alone(own: tuple[Path, Any], packed: bool) -> None:
    folder, model = own
    data, loss_fn = random_batch(), WeightedNLL()
    seqs, toks = count_valid(data)
    loss, _ = loss_fn(hf_logprobs_with_grad(model, data)[:, 1:], data, seqs, toks)
    loss.backward()
    packing = {"enabled": True, "train_mb_tokens": 70, "logprob_mb_tokens": 64} if packed else {"enabled": False}
    config = policy_config(str(folder), trust_remote_code=True, sequence_packing=packing)
    grads: dict[str, torch.Tensor] = {}
    with process_group():
        worker = PolicyWorker(DTensorBackend(config, CPU, init_reference_model=False), config)

        def keep() -> tuple[float, bool]:
            grads.update({name: each.grad.clone() for name, each in worker.backend.model.hf.named_parameters()})
            return 0.0, True

        worker.backend.clip_and_step = keep
        batch = shard_batch(data, 1, training_strategy(config))
        result = worker.train(batch.data[0], batch.sizes[0], loss_fn, count_valid(data))
    assert result.loss == pytest.approx(loss.item(), abs=2e-5)
    for name, parameter in model.named_parameters():
        error = (grads[name] - parameter.grad).abs().max()
        assert error <= 3e-4 * max(float(parameter.grad.abs().max()), 1e-3), name


def test_the_engine_samples_from_the_model(own: tuple[Path, Any]) -> None:
    folder, model = own
    results = asyncio.run(answered(HfEngine(make_settings(folder, "hf")), [ask(prompt) for prompt in PROMPTS]))
    for prompt, result in zip(PROMPTS, results, strict=True):
        expected = reference_logprobs(model, prompt, result.token_ids.tolist(), SamplingParams())
        assert result.logprobs.tolist() == pytest.approx(expected, abs=1e-4)


def test_checkpoint_and_export_carry_the_code(own: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = own
    config = policy_config(str(folder), trust_remote_code=True)
    step = tmp_path / "step_1/policy"
    with process_group():
        backend = DTensorBackend(config, CPU, init_reference_model=False)
        backend.save(CheckpointPaths(step / "weights"))
    training = DTensorTraining()
    training.complete_checkpoint(step / "weights", make_char_tokenizer(), None)
    training.export(step / "weights", tmp_path / "hf")
    assert code_files(tmp_path / "hf") == code_files(step / "weights/model") == code_files(folder)
    assert training.verify_export(step / "weights", tmp_path / "hf").max_difference < 1e-5
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    tokens = torch.tensor([[5, 9, 200]])
    torch.testing.assert_close(exported(tokens).logits, model(tokens).logits, rtol=0, atol=1e-6)
