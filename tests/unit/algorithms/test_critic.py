"""The stages of a critic and the epochs of a step, with stand-ins for the models."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from nemo_rl.algorithms.ppo import CriticUpdate, PolicyEpochs, ValueInference, check_vocabulary, recipe
from nemo_rl.algorithms.runtime.idle_steps import made_update
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.config import REPOSITORY_ROOT, PPOMasterConfig, load_config
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.branches import Branch
from nemo_rl.experience.trajectory import Outcome, Trajectory
from nemo_rl.losses.supervised import MseValueLossFn
from nemo_rl.utils.errors import ConfigError, DataError

CPU = REPOSITORY_ROOT / "examples/configs/ppo_math_cpu.yaml"


@dataclass
class Model:
    """Notes its calls of `train`; a value is the number of its row, and a score the sum of its tokens."""

    calls: list[tuple[BatchedDataDict[Any], Any]] = field(default_factory=list)

    def get_values(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        rows, tokens = data["input_ids"].shape
        return BatchedDataDict({"values": torch.arange(float(rows))[:, None].expand(rows, tokens)})

    def score(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        return BatchedDataDict({"scores": data["input_ids"].sum(1).float()})

    def train(self, data: BatchedDataDict[Any], loss_fn: Any, *, gbs: Any = None) -> Any:
        self.calls.append((data, gbs))
        num_updates = data.size // gbs if isinstance(gbs, int) else len(gbs)
        metrics = {
            "loss": 0.5,
            "grad_norm": 2.0,
            "lr": 0.1,
            "num_updates": float(num_updates),
            "skipped_updates": 0.0,
            "global_valid_seqs": float(data.size),
            "global_valid_toks": 2.0 * data.size,
            "vf_clipfrac": 0.25,
        }
        ones = torch.ones(num_updates)
        return {"loss": ones, "grad_norm": ones, "metrics": metrics, "all_mb_metrics": {}}


def samples(*num_branches: int) -> list[Trajectory]:
    log: Any = [{"role": "user", "content": "", "token_ids": torch.tensor([1])}]
    return [Trajectory(0, 0, 0, "math", log, 1, branches=[Branch(log, 1)] * count) for count in num_branches]


def batch_of(*num_branches: int) -> StepBatch:
    rows = sum(1 + count for count in num_branches)
    names = ("token_mask", "values", "returns", "advantages", "prev_logprobs")
    tensors = {name: torch.arange(3.0 * rows).view(rows, 3) for name in names}
    tensors |= {"input_ids": torch.ones(rows, 3, dtype=torch.int64), "input_lengths": torch.full((rows,), 3)}
    tensors |= {"sample_mask": torch.ones(rows)}
    return StepBatch(BatchedDataDict(tensors), samples(*num_branches))


def test_values_are_written_into_the_batch() -> None:
    batch = batch_of(0, 0)
    assert ValueInference(Model()).apply(batch) == {}
    assert batch.tensors["values"].tolist() == [[0.0] * 3, [1.0] * 3]


def test_only_truncated_answers_get_a_value_after_their_end() -> None:
    batch = batch_of(0, 1, 0)
    batch.tensors["input_ids"] = torch.arange(4)[:, None].expand(4, 3)
    batch.trajectories[1].outcome = batch.trajectories[2].outcome = Outcome.TRUNCATED
    ValueInference(Model(), continues_truncated=True).apply(batch)
    assert batch.tensors["values_after"].tolist() == [0.0, 0.0, 0.0, 9.0]  # a program with two conversations has ended
    batch.trajectories[2].outcome = Outcome.FINISHED
    ValueInference(Model(), continues_truncated=True).apply(batch)
    assert not batch.tensors["values_after"].any()


def test_the_critic_passes_over_the_rows_in_order() -> None:
    critic, batch = Model(), batch_of(0, 0, 0, 0)
    metrics = CriticUpdate(critic, MseValueLossFn({}), epochs=3, samples_per_update=2).apply(batch)
    ((rows, gbs),) = critic.calls
    assert gbs == 2 and rows.size == 12
    assert set(rows) == {"input_ids", "input_lengths", "token_mask", "sample_mask", "values", "returns"}
    assert torch.equal(rows["returns"], batch.tensors["returns"].repeat(3, 1))
    assert metrics == {
        "critic/loss": 0.5,
        "critic/grad_norm": 2.0,
        "critic/lr": 0.1,
        "critic/num_updates": 6.0,
        "critic/skipped_updates": 0.0,
        "vf_clipfrac": 0.25,
    }


def test_updates_of_the_critic_have_whole_samples() -> None:
    """Two samples for each update, of which the first and the third have two rows."""
    critic = Model()
    CriticUpdate(critic, MseValueLossFn({}), epochs=2, samples_per_update=2).apply(batch_of(1, 0, 1, 0))
    ((rows, gbs),) = critic.calls
    assert gbs == [3, 3, 3, 3] and rows.size == 12
    with pytest.raises(DataError, match="3 samples do not divide"):
        CriticUpdate(critic, MseValueLossFn({}), epochs=2, samples_per_update=2).apply(batch_of(1, 0, 1))


def test_the_policy_makes_all_epochs_in_one_call() -> None:
    policy = Model()
    trainer = PolicyEpochs(policy, epochs=2, samples_per_update=2, critic_only_steps=0, session=SimpleNamespace(step=1))
    data = batch_of(0, 0, 0, 0).tensors
    result = trainer.train(data, None)  # type: ignore[arg-type]
    ((rows, gbs),) = policy.calls
    assert (rows.size, gbs) == (8, 2)
    assert torch.equal(rows["advantages"], data["advantages"].repeat(2, 1))
    assert len(result["loss"]) == 4
    metrics = result["metrics"]
    assert (metrics["num_updates"], metrics["global_valid_seqs"], metrics["global_valid_toks"]) == (4.0, 4.0, 8.0)
    trainer.train(data, None, gbs=[1, 3])  # type: ignore[arg-type]
    assert policy.calls[1][1] == [1, 3, 1, 3]


def test_an_update_has_rows_of_one_pass() -> None:
    """6 rows twice divide into updates of 4 rows, but the second update would have rows of both passes."""
    trainer = PolicyEpochs(
        Model(), epochs=2, samples_per_update=4, critic_only_steps=0, session=SimpleNamespace(step=1)
    )
    with pytest.raises(DataError, match="6 rows of a step do not divide into optimizer updates of 4 rows"):
        trainer.train(batch_of(*[0] * 6).tensors, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_policy_does_not_receive_the_columns_of_the_critic(epochs: int) -> None:
    policy, data = Model(), batch_of(0, 0).tensors
    data["values_after"], of_critic = torch.zeros(2), {"values", "values_after", "returns"}
    PolicyEpochs(policy, epochs, 2, 0, SimpleNamespace(step=1)).train(data, None)  # type: ignore[arg-type]
    ((rows, _),) = policy.calls
    assert of_critic < set(data), "the batch keeps them for the log of the samples"
    assert set(rows) == set(data) - of_critic and rows.size == 2 * epochs


def test_the_policy_stays_as_it_is_in_the_first_steps() -> None:
    policy, running = Model(), SimpleNamespace(step=0)
    trainer = PolicyEpochs(policy, epochs=2, samples_per_update=2, critic_only_steps=2, session=running)
    data = batch_of(0, 0).tensors
    for step, calls in ((1, 0), (2, 0), (3, 1)):
        running.step = step
        result = trainer.train(data, None)  # type: ignore[arg-type]
        assert len(policy.calls) == calls
        assert made_update(result["metrics"])
    data["sample_mask"].zero_()
    running.step = 1
    assert not made_update(trainer.train(data, None)["metrics"])  # type: ignore[arg-type]


def test_the_parts_of_a_run_are_in_order() -> None:
    config = load_config(
        CPU,
        ["ppo.ppo_epochs=3", "ppo.policy_training_start_step=5", "value.train_global_batch_size=16"],
        PPOMasterConfig,
    )
    made = recipe(config)
    roles: Any = {"policy": Model(), "value": Model()}
    stages = made.stages(roles)
    assert [stage.name for stage in stages] == [
        *("policy_and_reference_logprobs", "value_inference", "advantage_calculation", "value_training"),
    ]
    assert [stage.roles for stage in stages] == [("policy",), ("value",), (), ("value",)]
    update: Any = stages[-1]
    assert (update.critic, update.epochs, update.samples_per_update) == (roles["value"], 3, 16)
    assert made.trainer is not None
    trainer: Any = made.trainer(roles, SimpleNamespace(step=1))
    assert (trainer.policy, trainer.epochs, trainer.critic_only_steps) == (roles["policy"], 3, 5)
    assert {name: (role.trains, role.keeps_reference) for name, role in made.roles.items()} == {
        "policy": (True, False),
        "value": (True, False),
    }


def test_a_critic_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY_ROOT / "examples/assets/tiny-chat")
    tokenizer.save_pretrained(tmp_path / "same")
    tokenizer.add_tokens(["unheard"])
    tokenizer.save_pretrained(tmp_path / "more")
    (tmp_path / "other").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (tmp_path / "same" / name).read_text()
        (tmp_path / "other" / name).write_text(text)
    words = json.loads((tmp_path / "other/tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "other/tokenizer.json").write_text(json.dumps(words))

    def check(name: str) -> None:
        overrides = [f"value.model_name={tmp_path / name}", f"value.tokenizer.name={tmp_path / name}"]
        check_vocabulary(load_config(CPU, overrides, PPOMasterConfig), get_tokenizer({"name": str(tmp_path / "same")}))

    check("same")
    check("more")
    with pytest.raises(ConfigError, match="2 tokens other ids"):
        check("other")


def test_forward_passes_of_a_run() -> None:
    """With one update there are no separate log-probabilities; a KL penalty in the reward needs both."""

    def passes(*overrides: str) -> tuple[bool, bool]:
        scoring: Any = recipe(load_config(CPU, overrides, PPOMasterConfig)).stages({"policy": None, "value": None})[0]
        return scoring.needs_prev, scoring.needs_reference

    kl = ("loss_fn.reference_policy_kl_penalty=0.1", "ppo.skip_reference_policy_logprobs_calculation=false")
    assert passes() == (True, False)
    assert passes("ppo.ppo_epochs=1") == (False, False)
    assert passes("ppo.ppo_epochs=1", "policy.train_global_batch_size=32", "policy.train_micro_batch_size=32") == (
        True,
        False,
    )
    assert passes("ppo.ppo_epochs=1", *kl) == (False, True)
    assert passes("ppo.ppo_epochs=1", *kl, "loss_fn.use_kl_in_reward=true") == (True, True)
