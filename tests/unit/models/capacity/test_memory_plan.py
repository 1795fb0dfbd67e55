"""Predicted memory against measured memory; selective checkpointing; the log lines of a run."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures import _COMMON, SPECIAL
from parity.every_type import tiny_model
from policy_helpers import WeightedNLL, policy_config, random_batch, run_ranks, save_tiny_model
from transformers import AutoConfig, PretrainedConfig

from nemo_rl.algorithms.setup import memory_forecast
from nemo_rl.algorithms.setup.memory_forecast import log_memory
from nemo_rl.config import REPOSITORY_ROOT, ClusterConfig, PolicyConfig, Role
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.capacity.memory import MemoryPlan, Work, keys_per_token
from nemo_rl.models.capacity.memory_trace import trace_model
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.mesh_check import DTensorRank
from nemo_rl.models.dtensor.parallelize import KEPT_OPERATORS
from nemo_rl.models.policy.batching import count_valid, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.utils.errors import ConfigError
from tools.measure_memory import Setting, measure

TINY = str(REPOSITORY_ROOT / "examples/assets/tiny-chat")
SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 8192}

DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 0,
    "mlp_only_layers": [0, 1, 2, 3],
}
MAMBA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "ssm_state_size": 32,
    "chunk_size": 64,
}


@pytest.mark.parametrize(
    "setting",
    [
        Setting("1 rank, packed, selective", packed=True, shape=SMALL, keys={"activation_checkpointing": "selective"}),
        Setting("1 rank, padded, other heads", shape=SMALL | {"head_dim": 64}, model_type="qwen3"),
        Setting("1 rank, critic", shape=SMALL, critic=True),
        Setting("1 rank, gated delta nets", packed=True, shape=SMALL | DELTA, model_type="qwen3_next"),
        Setting("1 rank, Mamba-2", packed=True, shape=SMALL | MAMBA, model_type="nemotron_h"),
    ],
    ids=lambda setting: setting.name,
)
def test_the_prediction_is_within_15_percent(setting: Setting) -> None:
    found, predicted, _ = measure(setting)
    assert predicted == pytest.approx(found["peak"], rel=0.15)


def model_config(model_type: str = "qwen2", **fields: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **_COMMON | {"vocab_size": 96} | SPECIAL.get(model_type, {}) | fields)


def test_the_activations_of_a_layer_equal_a_hand_count() -> None:
    """Qwen2 in float32: per token two norms that keep input, quotient and output (H each, and 1 + 1 for the root),
    queries and the output of attention (H each), keys and values (H / 2 each), and four widths of the feed-forward.
    """
    (layer, _) = trace_model(model_config(), 32, torch.float32, kept_operators=KEPT_OPERATORS).activations
    hidden, width, heads = 64, 96, 4
    assert layer.entry == 32 * 4 * hidden
    assert layer.outside == 32 * 4 * (4 * hidden + 2)
    assert layer.into_blocks == 32 * 4 * 2 * hidden
    assert layer.keys_values == 32 * 4 * hidden
    assert layer.inside == 32 * 4 * (2 * hidden + heads + 4 * width) + 32 * 4 * 2 * 16  # cosine and sine
    products = hidden + hidden // 2 + hidden // 2 + hidden + 2 * width + hidden
    assert layer.kept == 32 * 4 * (products + hidden)


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "phi3", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_architectures_are_traced(model_type: str) -> None:
    trace = trace_model(model_config(model_type), 32, torch.bfloat16, kept_operators=KEPT_OPERATORS)
    assert len(trace.activations) == len(trace.layers)
    assert all(each.inside > 0 and each.keys_values > 0 and each.kept > 0 for each in trace.activations)


def test_equal_layers_are_traced_once() -> None:
    """The number of layers does not change a layer."""
    two, six = (trace_model(model_config(num_hidden_layers=number), 32, torch.float32) for number in (2, 6))
    assert six.activations == two.activations * 3 and six.others == two.others


def test_a_data_dependent_architecture_is_counted_without_activations() -> None:
    policy = PolicyConfig.build(model_name="m", generation=None)
    plan = DTensorRank.predict(policy, ParallelLayout(), tiny_model("mpt").config, Work(32))
    assert plan.missing and plan.certain > 0 and "not known" in plan.table("x")


def plan_of(model: PretrainedConfig | None = None, tokens: int = 4096, precision: str = "float32", **keys: Any) -> Any:
    axes = {name: keys.pop(name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep") if name in keys}
    optimizer = keys.pop("optimizer", "torch.optim.AdamW")
    policy = PolicyConfig.build(
        model_name="m", precision=precision, dtensor_cfg=keys, generation=None, optimizer={"name": optimizer}
    )
    return DTensorRank.predict(policy, ParallelLayout(**axes), model or model_config(), Work(tokens))


def activations(plan: MemoryPlan) -> float:
    return plan.moments["head backward"]["activations"]


def test_each_mesh_axis_divides_its_part_of_the_memory() -> None:
    one, model = plan_of(), model_config()
    total = trace_model(model, 8, torch.float32)
    parameters = sum(layer.total for layer in total.layers) + total.embedding.total + total.last.total
    assert one.stays["weights"] == 4 * parameters and one.stays["optimizer state"] == 8 * parameters
    assert plan_of(dp_shard=4).stays["weights"] == one.stays["weights"] / 4
    assert plan_of(dp_replicate=4).stays["weights"] == one.stays["weights"]
    assert 0.5 < plan_of(tp=2).stays["weights"] / one.stays["weights"] < 0.52  # norms and biases are on both
    assert plan_of(optimizer="torch.optim.SGD").stays["optimizer state"] == 0
    by_muon = sum(layer.matrices for layer in total.layers)
    assert plan_of(optimizer="torch.optim.Muon").stays["optimizer state"] == 8 * parameters - 4 * by_muon
    assert activations(plan_of(dp_shard=2)) == activations(one)
    assert activations(plan_of(tp=2, sequence_parallel=True)) < activations(plan_of(tp=2)) < activations(one)
    assert activations(plan_of(cp=2, context_parallel_method="ulysses")) == pytest.approx(
        activations(one) / 2, rel=0.01
    )
    assert activations(plan_of(cp=2, context_parallel_method="ulysses")) < activations(plan_of(cp=2))
    tied = model_config(tie_word_embeddings=True)
    assert plan_of(model).certain - plan_of(tied).certain == 12 * 96 * 64  # one table, with two moments
    assert plan_of(tied, pp=2).certain > plan_of(tied).certain / 2  # both stages of a pipeline have it
    deep = model_config(num_hidden_layers=4)
    piped = plan_of(deep, pp=2)
    assert activations(piped) == pytest.approx(activations(plan_of(deep)), rel=0.05)  # two microbatches in half of them
    experts = model_config("qwen3_moe")
    assert plan_of(experts, dp_shard=4, ep=2).stays == plan_of(experts, dp_shard=4).stays
    some, all_of_them = (plan_of(experts, dp_shard=4, ep=ep).moments["head backward"] for ep in (2, 1))
    assert some["gathered weights"] < all_of_them["gathered weights"]
    recomputed = [activations(plan_of(activation_checkpointing=how)) for how in (True, "selective", False)]
    assert recomputed == sorted(recomputed)


def test_a_critic_has_no_logits_but_float32_copies_of_hidden_states() -> None:
    """The hidden states of all tokens and their gradient, where a language model has chunks of logits.

    A reward model has those of the last tokens of rows, which are not counted.
    """
    given = {"model_name": "m", "precision": "bfloat16", "generation": None}
    tokens, hidden, vocabulary = 4096, 64, 96
    language, critic, reward_model = (
        DTensorRank.predict(
            PolicyConfig.build(**given, reward_model_cfg={"enabled": scalar}),
            ParallelLayout(),
            model_config(),
            Work(tokens, scores_rows=scores_rows),
        ).moments["head backward"]
        for scalar, scores_rows in ((False, False), (True, False), (True, True))
    )
    assert critic["logits"] * vocabulary == language["logits"]
    assert critic["activations"] - language["activations"] == 2 * tokens * hidden * 4
    assert reward_model == critic | {"activations": language["activations"]}


def test_gathered_weights_are_one_layer_with_fsdp_and_all_in_a_stage() -> None:
    """FSDP gathers layer by layer, a pipeline stage all of its layers once; a single float32 rank has no FSDP."""
    deep = model_config(num_hidden_layers=8)
    size = 4 * trace_model(deep, 8, torch.float32).layers[0].total

    def gathered(layers: int, **axes: int) -> float:
        moment = plan_of(model_config(num_hidden_layers=layers), **axes).moments["head backward"]
        return moment["gathered weights"]

    assert gathered(8, pp=2) == 0
    assert gathered(8, dp_shard=2) == gathered(4, dp_shard=2)
    assert gathered(8, pp=2, dp_shard=2) - gathered(4, pp=2, dp_shard=2) == 2 * size


def test_context_parallel_ranks_hold_the_keys_of_whole_rows() -> None:
    """Context-parallel ranks that gather keys and values keep them, twice without a kernel for pieces."""
    policy = PolicyConfig.build(model_name="m", precision="float32", generation=None)
    one, two, on_cpu = (
        activations(DTensorRank.predict(policy, ParallelLayout(cp=cp), model_config(), Work(64, on_cpu=cpu)))
        for cp, cpu in ((1, True), (2, False), (2, True))
    )
    keys = sum(layer.keys_values for layer in trace_model(model_config(), 64, torch.float32).activations)
    assert two == pytest.approx(one / 2 + keys / 2, rel=0.01)
    assert on_cpu - two == keys


def _gradients(rank: int, ranks: int, model: str, how: bool | str, precision: str) -> dict[str, torch.Tensor]:
    config = policy_config(
        model,
        precision=precision,
        dtensor_cfg={"activation_checkpointing": how},
        sequence_packing={"enabled": True, "train_mb_tokens": 64},
    )
    backend = DTensorBackend(config, torch.device("cpu"))
    gradients: dict[str, torch.Tensor] = {}

    def keep() -> tuple[float, bool]:
        for name, parameter in backend.model.hf.named_parameters():
            assert parameter.grad is not None
            whole = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            gradients[name] = whole.clone()
        return 0.0, True

    backend.clip_and_step = keep  # type: ignore[method-assign]
    data = random_batch()
    batch = shard_batch(data, ranks, training_strategy(config))
    PolicyWorker(backend, config).train(batch.data[rank], batch.sizes[rank], WeightedNLL(), count_valid(data))
    return gradients


@pytest.mark.parametrize(("ranks", "precision"), [(1, "float32"), (2, "bfloat16")])
def test_activation_checkpointing_changes_no_gradient(tmp_path, ranks: int, precision: str) -> None:
    model = save_tiny_model(tmp_path / "m", "gemma3")
    plain, *others = (run_ranks(_gradients, ranks, model, how, precision)[0] for how in (False, True, "selective"))
    assert len(plain) > 10
    for gradients in others:
        assert all(torch.equal(plain[name], gradient) for name, gradient in gradients.items())


def told(caplog: pytest.LogCaptureFixture, policy: PolicyConfig, trains: bool = True) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO):
        cluster = ClusterConfig.build(device="cpu", ranks_per_node=2)
        log_memory(
            cluster, {"policy": Role(policy, trains, keeps_reference=trains)}, memory_forecast.memory_of_a_rank(cluster)
        )
    return "\n".join([caplog.text, *(getattr(record, "details", "") for record in caplog.records)])


def test_a_run_logs_its_predicted_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    policy = PolicyConfig.build(model_name=TINY, precision="float32", generation=None)
    text = told(caplog, policy)
    assert "Predicted memory of policy, GiB on each rank" in text and "GiB at most on each of 2 ranks, in '" in text
    for kind in ("weights", "reference weights", "optimizer state", "activations", "gathered weights"):
        assert f"  {kind}" in text
    assert "WARNING" not in text and "optimizer state" not in told(caplog, policy, trains=False)
    monkeypatch.setattr(memory_forecast, "machine_bytes", lambda: 2 * 0.1 * 2**30)
    assert "policy will need about" in told(caplog, policy) and "of the 0.1 GiB that it has" in caplog.text
    monkeypatch.setenv("RAY_ADDRESS", "somewhere")
    assert "will need about" not in told(caplog, policy)
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(memory_forecast, "machine_bytes", lambda: 2 * 0.001 * 2**30)
    with pytest.raises(ConfigError, match=r"weights and optimizer state of policy take .* of the 0\.001 GiB"):
        told(caplog, policy)


def test_cpu_offload_moves_resident_memory_to_the_host() -> None:
    policy = PolicyConfig.build(model_name="m", generation=None, dtensor_cfg={"cpu_offload": True})
    work = Work(64, keeps_reference=True)
    plan = DTensorRank.predict(policy, ParallelLayout(dp_shard=2), model_config(), work)
    assert plan.certain == 0 and {"weights", "optimizer state", "gradients"} < plan.host.keys()
    on_cpu = DTensorRank.predict(policy, ParallelLayout(dp_shard=2), model_config(), replace(work, on_cpu=True))
    assert on_cpu.certain > 0 and not on_cpu.host


def test_keys_of_shared_prompts_are_predicted() -> None:
    """By hand: two tensors of keys and values, 2 layers, each more than once for each token."""
    model = model_config(num_key_value_heads=2)
    section = PolicyConfig.build(model_name="m", precision="float32", sequence_packing={"enabled": True})
    plans = [
        DTensorRank.predict(section, ParallelLayout(), model, Work(64, keys_per_token=factor)) for factor in (1, 4)
    ]
    width = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    more = 3 * 64 * 2 * 2 * width * 4 * model.num_hidden_layers
    one, four = (plan.moments["head backward"]["activations"] for plan in plans)
    assert four - one == more


@pytest.mark.parametrize(
    ("values", "rows", "wanted"),
    [
        ({}, 1, 1),
        ({}, 2, 4),
        ({}, 16, 4),
        ({"sequence_packing": {"enabled": True, "max_keys_per_token": 9}}, 16, 9),
        ({"sequence_packing": {"enabled": True, "share_prompts": False}}, 16, 1),
        ({"dtensor_cfg": {"context_parallel_size": 2}}, 16, 1),
    ],
)
def test_the_bound_on_keys_equals_that_of_the_packer(values, rows, wanted) -> None:
    policy = PolicyConfig.build(**{"model_name": "m", "sequence_packing": {"enabled": True}} | values)
    assert keys_per_token(policy, rows) == wanted
