"""With `invariant_gradients`, weights after updates have the same bits for all microbatches and numbers of ranks.

Batches have filler rows with two and with three ranks, and the parts of small parameters do not fill vector registers.
"""

import hashlib
from typing import Any

import pytest
import torch
from policy_helpers import policy_config, random_batch, run_ranks, save_tiny_model

from nemo_rl.config import ClippedPGLossConfig, ClusterConfig, OptimizerConfig, PolicyConfig
from nemo_rl.config.rules.engines import check_device, check_invariant_gradients
from nemo_rl.data.packing import OneByOne, plan_microbatches
from nemo_rl.distributed.ranks.placements import whole
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.losses.preference import DPOLossConfig, DPOLossFn
from nemo_rl.losses.supervised import NLLLossFn
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.optimizer import require_element_by_element
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.models.training.ordered_sums import ordered_norm
from nemo_rl.utils.errors import ConfigError, DataError

CPU = torch.device("cpu")
UPDATES = 3
LOSSES = {
    "grpo": ClippedPGLossFn(ClippedPGLossConfig.build(reference_policy_kl_penalty=0.1)),
    "sft": NLLLossFn(),
    "dpo": DPOLossFn(
        DPOLossConfig(
            reference_policy_kl_penalty=0.3,
            preference_loss_weight=1.0,
            sft_loss_weight=0.2,
            preference_average_log_probs=False,
            sft_average_log_probs=True,
        )
    ),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {"train_micro_batch_size": 1, "logprob_batch_size": 1},
    "2": {"train_micro_batch_size": 2, "make_sequence_length_divisible_by": 8},
    "4": {"train_micro_batch_size": 4},
    "dynamic": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 96, "sequence_length_round": 4}},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 70, "logprob_mb_tokens": 64}},
}


type Outcome = tuple[str, tuple[float, ...]]
"""Hash of the weights after some updates, and norms of the gradients."""


def outcomes_here(rank: int, num_ranks: int, name: str, loss_name: str, common: dict[str, Any]) -> list[Outcome]:
    """Train with each layout."""
    layouts = common.pop("layouts", LAYOUTS)
    return [_outcome(rank, num_ranks, name, loss_name, common | LAYOUTS[layout]) for layout in layouts]


def _outcome(rank: int, num_ranks: int, name: str, loss_name: str, values: dict[str, Any]) -> Outcome:
    config, loss_fn = policy_config(name, **values), LOSSES[loss_name]
    worker = PolicyWorker(DTensorBackend(config, CPU), config)
    norms = []
    for seed in range(UPDATES):
        data = random_batch(rows=8 if loss_name == "dpo" else 7, seed=seed)
        if loss_name == "dpo":
            data["sample_mask"][:2] = 1.0
        own = worker.get_logprobs(*of_rank(data, rank, num_ranks, logprob_strategy(config)))
        reference = worker.get_reference_policy_logprobs(*of_rank(data, rank, num_ranks, logprob_strategy(config)))
        data["prev_logprobs"] = in_order(own, data, num_ranks, config)
        data["reference_policy_logprobs"] = in_order(reference, data, num_ranks, config)
        data["generation_logprobs"] = data["prev_logprobs"] + 0.01
        group = loss_fn.rows_per_unit
        batch = shard_batch(data, num_ranks, training_strategy(config, None, group), group)
        norms.append(worker.train(batch.data[rank], batch.sizes[rank], loss_fn, count_valid(data)).grad_norm)
    digest = hashlib.sha256()
    for weight in worker.backend.model.hf.parameters():
        digest.update(whole(weight.detach()).contiguous().numpy().tobytes())
    return digest.hexdigest(), tuple(norms)


def of_rank(data, rank, num_ranks, strategy):
    """Return the rows and the sizes of the microbatches of a rank."""
    batch = shard_batch(data, num_ranks, strategy)
    return batch.data[rank], batch.sizes[rank]


def in_order(scores, data, num_ranks, config):
    """Gather the scores of all ranks, in the order of the batch."""
    parts: list[Any] = [None] * num_ranks
    torch.distributed.all_gather_object(parts, scores)
    return shard_batch(data, num_ranks, logprob_strategy(config)).restore(parts)


def outcomes(name: str, loss_name: str, ranks: tuple[int, ...], **common: Any) -> list[Outcome]:
    """Return the outcomes with each number of ranks and each layout."""
    found = []
    for num_ranks in ranks:
        first, *others = run_ranks(outcomes_here, num_ranks, name, loss_name, common)
        assert all(other == first for other in others)
        found += first
    return found


def test_weights_have_the_same_bits(tmp_path) -> None:
    name = save_tiny_model(tmp_path, "qwen2")
    common = {"max_grad_norm": 0.5, "invariant_gradients": True, "layouts": ("2", "packed")}
    found = outcomes(name, "grpo", (1, 2), **common)
    assert len(found) == 4 and len(set(found)) == 1
    assert min(found[0][1]) > 0.5, "gradients are clipped"


@pytest.mark.long
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("loss_name", LOSSES)
def test_all_layouts_have_the_same_bits(loss_name: str, precision: str, tmp_path) -> None:
    name = save_tiny_model(tmp_path, "qwen2", tie=loss_name == "sft")
    common = {"precision": precision, "max_grad_norm": 0.5, "invariant_gradients": True}
    found = outcomes(name, loss_name, (1, 2, 3), **common)
    assert len(found) == 15 and len(set(found)) == 1


def test_without_the_key_bits_differ(tmp_path) -> None:
    name = save_tiny_model(tmp_path, "qwen2")
    found = outcomes(name, "grpo", (1, 2), max_grad_norm=0.5, layouts=("2", "packed"))
    assert len({digest for digest, _ in found}) >= 3


def test_the_update_is_that_of_a_whole_batch(tmp_path) -> None:
    name = save_tiny_model(tmp_path, "qwen2")
    with_key = outcomes(name, "grpo", (2,), max_grad_norm=0.5, layouts=("2",), invariant_gradients=True)
    without = outcomes(name, "grpo", (1,), max_grad_norm=0.5, layouts=("2",))
    assert with_key[0][1] == pytest.approx(without[0][1], rel=1e-4)
    assert with_key[0][0] != without[0][0]


def test_ranks_take_turns_in_the_order_of_rows() -> None:
    assert plan_microbatches([3] * 6, 2, OneByOne()).shards == [[[0], [2], [4]], [[1], [3], [5]]]
    assert plan_microbatches([3] * 8, 2, OneByOne(), 2).shards == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    with pytest.raises(DataError, match="5 rows do not divide among 2"):
        plan_microbatches([3] * 5, 2, OneByOne())


def test_the_norm_is_that_of_all_gradients() -> None:
    gradients = [torch.tensor([3.0, -0.0]), torch.tensor([[4.0]]), torch.full((2, 3), 1e-3)]
    expected = torch.cat([each.flatten() for each in gradients]).double().square().sum().sqrt()
    assert ordered_norm(gradients) == pytest.approx(expected.item(), rel=1e-15)
    assert not gradients[0].signbit().any()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dtensor_cfg": {"dp_replicate_size": 2}}, "adds them in groups"),
        ({"dtensor_cfg": {"tensor_parallel_size": 2}}, "dtensor_cfg.tensor_parallel_size=2"),
        ({"dtensor_cfg": {"context_parallel_size": 2}}, "dtensor_cfg.context_parallel_size=2"),
        ({"dtensor_cfg": {"moe_aux_loss_coeff": 0.1}}, "moe_aux_loss_coeff=0"),
        ({"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 4, "dropout": 0.1}}}, "lora_cfg.dropout=0"),
        ({"optimizer": {"name": "torch.optim.Muon", "kwargs": {}}}, "Muon divides"),
        ({"megatron_cfg": {"enabled": True}, "dtensor_cfg": {"enabled": False}}, "needs the PyTorch-native backend"),
    ],
)
def test_settings_with_other_sums_are_refused(values: dict[str, Any], message: str) -> None:
    found = list(check_invariant_gradients("policy", policy_config("m", invariant_gradients=True, **values)))
    assert len(found) == 1 and message in found[0]


def test_gpus_are_refused() -> None:
    policy = policy_config("m", invariant_gradients=True)
    found = list(check_device(policy, ClusterConfig.build(device="cuda", gpus_per_node=1)))
    assert len(found) == 1 and "on CPUs only" in found[0]


def _with_dropout(rank: int, num_ranks: int, name: str) -> None:
    values = {"invariant_gradients": True, "hf_config_overrides": {"attention_dropout": 0.1}}
    config: PolicyConfig = policy_config(name, **values)
    with pytest.raises(ConfigError, match="attention_dropout"):
        DTensorBackend(config, CPU)


def test_dropout_is_refused(tmp_path) -> None:
    run_ranks(_with_dropout, 1, save_tiny_model(tmp_path, "qwen2"))


class ByTheSum(torch.optim.SGD):
    """An optimizer whose step depends on the sum of a tensor."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad * parameter.grad.sum()
        return super().step(closure)


def test_an_optimizer_of_whole_tensors_is_refused() -> None:
    require_element_by_element(OptimizerConfig.build(name="torch.optim.AdamW", kwargs={"lr": 1e-3}))
    own = OptimizerConfig.build(name=f"{__name__}.ByTheSum", kwargs={"lr": 1e-3})
    with pytest.raises(ConfigError, match="ByTheSum updates"):
        require_element_by_element(own)
