"""A critic with adapters: values and gradients are those of its merged weights, by Hugging Face in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from critic_cases import SquaredError, critic_batch, hf_values, kept_gradients, reference, relative, save_critic
from policy_helpers import policy_config, process_group, tiny_model
from tiny_models import make_char_tokenizer
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from nemo_rl.losses.supervised import MseValueLossFn
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.models.training.interfaces import CheckpointPaths

CPU = torch.device("cpu")
DATA = critic_batch()
LORA = {"enabled": True, "dim": 4, "alpha": 8}
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"train_micro_batch_size": 2, "logprob_batch_size": 3},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 70, "logprob_mb_tokens": 64}},
}


def values_of(worker: PolicyWorker, config: Any) -> Tensor:
    batch = shard_batch(DATA, 1, logprob_strategy(config), shares_prompts=worker.shares_prompts())
    return batch.restore([worker.get_values(batch.data[0], batch.sizes[0])])


def update(worker: PolicyWorker, config: Any, loss: Any) -> Any:
    batch = shard_batch(DATA, 1, training_strategy(config), shares_prompts=worker.shares_prompts())
    return worker.train(batch.data[0], batch.sizes[0], loss, count_valid(DATA))


def merged(weights: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(weights / "model", dtype=torch.float64).eval()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_are_those_of_the_merged_weights(layout: str, tmp_path: Path) -> None:
    """For W + s B A, the chain rule gives the gradients of A and B from the gradient of the merged weight."""
    name = save_critic(tmp_path / "base", tiny_model("qwen3"))
    make_char_tokenizer().save_pretrained(name)
    config = policy_config(name, dtensor_cfg={"lora_cfg": LORA}, reward_model_cfg={"enabled": True}, **LAYOUTS[layout])
    with process_group():
        worker = PolicyWorker(DTensorBackend(config, CPU, init_reference_model=False, seed=6), config)
        before = values_of(worker, config)
        for _ in range(2):  # after the first update B is not zero, after the second A has moved
            update(worker, config, SquaredError())
        worker.backend.save(CheckpointPaths(tmp_path / "weights", tmp_path / "optimizer"))
        values = values_of(worker, config)
        state = {key: tensor.detach().double() for key, tensor in worker.backend.model.hf.named_parameters()}
        gradients = kept_gradients(worker)
        result = update(worker, config, SquaredError())
    want = reference(merged(tmp_path / "weights"), DATA)
    assert (values - before).abs().max() > 1e-2
    torch.testing.assert_close(values.double(), want["values"], rtol=0, atol=1e-5)
    assert result.loss == pytest.approx(want["loss"], rel=1e-5)
    scale = LORA["alpha"] / LORA["dim"]
    adapted = {key.removesuffix(".lora_A") for key in gradients if key.endswith(".lora_A")}
    assert gradients.keys() == {f"{key}.{part}" for key in adapted for part in ("lora_A", "lora_B")} | {"score.weight"}
    assert relative(gradients["score.weight"], want["gradients"]["score.weight"]) < 1e-4
    for key in adapted:
        of_weight = want["gradients"][f"{key}.weight"]
        assert relative(gradients[f"{key}.lora_A"], scale * state[f"{key}.lora_B"].T @ of_weight) < 1e-4, key
        assert relative(gradients[f"{key}.lora_B"], scale * of_weight @ state[f"{key}.lora_A"].T) < 1e-4, key


def test_the_value_loss_of_a_critic_with_adapters_by_hand(tmp_path: Path) -> None:
    """The clipped loss of PPO, `1/2 max((V - R)^2, (clip(V) - R)^2)`, of values by Hugging Face in float64."""
    name = save_critic(tmp_path / "base", tiny_model("qwen3"))
    config = policy_config(name, dtensor_cfg={"lora_cfg": LORA}, reward_model_cfg={"enabled": True})
    loss = MseValueLossFn({"cliprange": 0.2})
    values = hf_values(AutoModelForSequenceClassification.from_pretrained(name, dtype=torch.float64), DATA).detach()
    old = values + torch.linspace(-0.5, 0.5, values.shape[1])
    clipped = old + (values - old).clamp(-0.2, 0.2)
    returns = DATA["returns"].double()
    worst = torch.maximum((values - returns).square(), (clipped - returns).square()) / 2
    mask = DATA["token_mask"][:, 1:] * DATA["sample_mask"][:, None]
    want = float((worst[:, 1:] * mask).sum() / mask.sum())
    DATA["values"] = old.float()
    with process_group():
        worker = PolicyWorker(DTensorBackend(config, CPU, init_reference_model=False, seed=6), config)
        assert update(worker, config, loss).loss == pytest.approx(want, rel=1e-5)
    del DATA["values"]
