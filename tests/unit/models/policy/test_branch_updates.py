"""Updates of samples with several rows: the gradient is that of all rows with the advantage of their sample."""

from typing import Any

import pytest
import torch
from policy_helpers import hf_logprobs_with_grad, policy_config, process_group, save_tiny_model
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.credit.advantages import make_advantage_estimator
from nemo_rl.algorithms.grpo import CreditAssignment
from nemo_rl.algorithms.rollout.batches import build_training_batch
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.algorithms.scoring import PolicyScoring
from nemo_rl.config import ClippedPGLossConfig, GRPOConfig
from nemo_rl.experience.branches import Branch
from nemo_rl.experience.rows import rows_per_update
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, global_batches, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker

CPU = torch.device("cpu")
REWARDS = [2.0, 0.0, 1.0, 0.5]
"""Rewards of two groups of two samples; the first has two conversations and the last three."""
ADVANTAGES = [[1.0, 1.0], [-1.0], [0.25], [-0.25] * 3]
"""Advantages of the rows of each sample: the reward less the mean of the group."""


def conversation(seed: int, prompt: int, response: int) -> list[dict[str, Any]]:
    ids = torch.randint(3, 90, (prompt + response,), generator=torch.Generator().manual_seed(seed))
    logprobs = torch.full((response,), -3.0)
    return [
        {"role": "user", "content": "", "token_ids": ids[:prompt]},
        {"role": "assistant", "content": "", "token_ids": ids[prompt:], "generation_logprobs": logprobs},
    ]


def samples() -> list[Trajectory]:
    made = [
        Trajectory(number // 2, number % 2, 0, "task", conversation(number, 3, 4 + number), 3, reward=reward)
        for number, reward in enumerate(REWARDS)
    ]
    for number, advantages in enumerate(ADVANTAGES):
        prompts = range(5, 4 + len(advantages))
        made[number].branches = [Branch(conversation(10 * number + length, length, 3), length) for length in prompts]
    return made


def expected_gradients(name: str, batch: Any, *, sequence_level: bool) -> dict[str, torch.Tensor]:
    """The gradients of `-A * log p`, a mean over tokens or over rows, by autograd in float64."""
    model = AutoModelForCausalLM.from_pretrained(name).double()
    logprobs_BT, mask_BT = hf_logprobs_with_grad(model, batch), batch["token_mask"].double()
    advantage_B = torch.tensor([value for rows in ADVANTAGES for value in rows], dtype=torch.float64)
    of_rows = (logprobs_BT * mask_BT).sum(1) * advantage_B
    loss = -(of_rows / mask_BT.sum(1)).mean() if sequence_level else -of_rows.sum() / mask_BT.sum()
    loss.backward()
    return {key: value.grad for key, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("sequence_level", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_the_gradient_is_that_of_all_rows(packing: bool, sequence_level: bool, tmp_path: Any) -> None:
    name = save_tiny_model(tmp_path / "m")
    trajectories = samples()
    batch = StepBatch(build_training_batch(trajectories, 0, mask_truncated=False), trajectories)
    grpo = GRPOConfig.build(adv_estimator={"name": "dr_grpo"})
    loss = ClippedPGLossConfig.build(reference_policy_kl_penalty=0.0, token_level_loss=not sequence_level)
    PolicyScoring(None, needs_prev=False, needs_reference=False).apply(batch)  # type: ignore[arg-type]
    CreditAssignment(make_advantage_estimator(grpo, loss), grpo).apply(batch)
    assert batch.tensors["num_counted_samples"].tolist() == [7.0] * 7

    values = {"sequence_packing": {"enabled": True, "train_mb_tokens": 40}} if packing else {}
    config = policy_config(name, train_global_batch_size=4, **values)
    with process_group():
        backend: Any = DTensorBackend(config, CPU)
        worker = PolicyWorker(backend, config)
        gradients: dict[str, torch.Tensor] = {}
        step = backend.clip_and_step

        def step_and_keep() -> Any:
            named = backend.model.hf.named_parameters()
            gradients.update({key: value.grad.detach().clone() for key, value in named})
            return step()

        backend.clip_and_step = step_and_keep
        sharded = shard_batch(batch.tensors, 1, training_strategy(config))
        result = worker.train(sharded.data[0], sharded.sizes[0], ClippedPGLossFn(loss), count_valid(batch.tensors))
    assert not result.skipped
    expected = expected_gradients(name, batch.tensors, sequence_level=sequence_level)
    assert expected.keys() <= gradients.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(gradients[key].double(), gradient, rtol=1e-3, atol=2e-5)


def test_each_update_has_its_share_of_the_samples() -> None:
    trajectories = samples()
    tensors = build_training_batch(trajectories, 0, mask_truncated=False)
    counts = rows_per_update(trajectories, samples_per_update=2)
    assert counts == [3, 4]
    first, second = global_batches(tensors, counts, allow_partial=False)
    assert torch.equal(first["input_ids"], tensors["input_ids"][:3])
    assert torch.equal(second["input_ids"], tensors["input_ids"][3:])
