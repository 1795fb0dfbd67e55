"""Predicted memory of Megatron Core's ranks: what each axis divides, and (marked long) what training takes."""

from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from nemo_rl.config import MegatronConfig, PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.capacity.hub_configs import FOLDER
from nemo_rl.models.capacity.memory import MemoryPlan, Work
from nemo_rl.models.huggingface.sizes import parameters_of
from nemo_rl.models.megatron.mesh_check import MeshPlace, stage_layers
from nemo_rl.models.megatron.training_backend import MegatronTraining
from tools.measure_memory import SETTINGS_OF_MEGATRON, Setting, measure

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
MEASURED = ("1 rank", "tp 2", "pp 2", "dp 2")


@pytest.mark.long
@pytest.mark.parametrize(
    "setting",
    [each for each in SETTINGS_OF_MEGATRON if each.name.removeprefix("megatron, ") in MEASURED],
    ids=lambda setting: setting.name,
)
def test_the_prediction_is_within_15_percent(setting: Setting) -> None:
    found, predicted, _ = measure(setting)
    assert predicted == pytest.approx(found["peak"], rel=0.15)


def model_config(model_type: str = "qwen2", **fields: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **SHAPE | (EXPERTS if model_type == "qwen3_moe" else {}) | fields)


SHORT_GRADIENTS = {"grad_reduce_in_fp32": False}


def plan_of(model: PretrainedConfig | None = None, *, on_cpu: bool = False, **keys: Any) -> MemoryPlan:
    axes = {name: keys.pop(name) for name in ("pp", "dp_shard", "cp", "tp", "ep") if name in keys}
    precision, trains = keys.pop("precision", "bfloat16"), keys.pop("trains", True)
    keys.setdefault("distributed_data_parallel_config", SHORT_GRADIENTS)
    policy = PolicyConfig.build(
        model_name="m",
        precision=precision,
        generation=None,
        dtensor_cfg={"enabled": False},
        megatron_cfg={"enabled": True, **keys},
    )
    work = Work(4096, trains=trains, on_cpu=on_cpu, keeps_reference=trains)
    return MeshPlace.predict(policy, ParallelLayout(**axes), model or model_config(), work)


def activations(plan: MemoryPlan) -> float:
    return plan.moments["head backward"]["activations"]


def test_resident_memory_of_one_rank_equals_the_arithmetic() -> None:
    """bfloat16 weights and gradients; in float32 a weight and two moments; a copy of the weights on the host."""
    total = parameters_of(model_config())
    one = plan_of()
    assert one.stays == {"weights": 2 * total, "gradients": 2 * total, "optimizer state": 12 * total}
    assert one.host == {"reference weights and their place": 4 * total}
    assert plan_of(precision="float32").stays["optimizer state"] == 8 * total
    assert plan_of(optimizer={"optimizer": "sgd"}).stays["optimizer state"] == 8 * total
    tables = 2 * model_config().vocab_size * model_config().hidden_size + model_config().hidden_size
    muon = plan_of(optimizer={"optimizer": "muon", "use_distributed_optimizer": False}).stays["optimizer state"]
    assert muon == 8 * total + 4 * tables, "a second moment of embedding, head and last norm"
    assert plan_of(distributed_data_parallel_config={}).stays["gradients"] == 4 * total, "float32 by default"
    assert plan_of(trains=False).stays == {"weights": 2 * total}
    on_host = plan_of(optimizer={"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.75})
    assert on_host.stays["optimizer state"] == 3 * total and on_host.host["optimizer state"] == 9 * total
    assert plan_of(on_cpu=True).stays["reference weights and their place"] == 4 * total


def test_each_mesh_axis_divides_its_part_of_the_memory() -> None:
    one, total = plan_of(), parameters_of(model_config())
    spread = plan_of(dp_shard=2, cp=2)
    assert spread.stays["weights"] == one.stays["weights"] and spread.stays["optimizer state"] == 12 * total / 4
    assert plan_of(dp_shard=4, optimizer={"use_distributed_optimizer": False}).stays == one.stays
    assert plan_of(dp_shard=4).moments["update"]["float32 gradients"] == 4 * total / 4
    assert 0.5 < plan_of(tp=2).stays["weights"] / one.stays["weights"] < 0.53  # norms and biases are on both
    assert activations(plan_of(tp=2, sequence_parallel=True)) < activations(plan_of(tp=2)) < activations(one)
    layers = {key: activations(plan_of(pp=2, **given)) for key, given in {"plain": {}, "virtual": INTERLEAVED}.items()}
    assert layers["plain"] == pytest.approx(activations(one), rel=0.1) and layers["virtual"] > layers["plain"]
    assert activations(plan_of(activation_checkpointing=True)) < activations(one) / 3
    selective = plan_of(activation_checkpointing=True, recompute_granularity="selective")
    assert activations(selective) == activations(one) and "as if it were off" in selective.missing
    assert activations(plan_of(on_cpu=True)) > activations(one)  # unfused code keeps what fused kernels do not


INTERLEAVED = {"virtual_pipeline_model_parallel_size": 2}


def test_experts_are_divided_over_their_own_ranks() -> None:
    model = model_config("qwen3_moe")
    experts = 4 * 8 * 3 * 64 * 32
    others = parameters_of(model) - experts
    spread = plan_of(model, dp_shard=4, ep=2)
    assert spread.stays["weights"] == 2 * (experts / 2 + others)
    assert spread.stays["optimizer state"] == 12 * (experts / 2 / 2 + others / 4)
    tensor = plan_of(model, dp_shard=2, tp=2, ep=2, sequence_parallel=True)
    routers = 4 * 64 * 8
    vectors = 4 * (2 * 64 + 2 * 16) + 64
    assert tensor.stays["weights"] == 2 * (experts / 2 + (others - routers - vectors) / 2 + routers + vectors)
    assert tensor.stays["optimizer state"] == 6 * (experts / 2 + tensor.stays["weights"] / 2 - experts / 2)


def test_lora_counts_gradients_of_adapters_only() -> None:
    """Elements are inputs plus outputs of a layer's linears, as in Hugging Face, times their rank."""
    total = parameters_of(model_config())
    attention, feed_forward = (64 + 64) + 2 * (64 + 32) + (64 + 64), 3 * (64 + 96)
    adapters = 4 * (attention + feed_forward) * 16
    peft = {"enabled": True, "dim": 16}
    one = plan_of(peft=peft)
    assert one.stays == {"weights": 2 * (total + adapters), "gradients": 2 * adapters, "optimizer state": 12 * adapters}
    assert one.host == {}, "the reference is the model without adapters"
    spread = plan_of(peft=peft, pp=2, dp_shard=2)
    assert spread.stays["gradients"] == adapters and spread.stays["optimizer state"] == 12 * adapters / 2 / 2
    assert plan_of(peft=peft, on_cpu=True).moments["update"]["optimizer's temporaries"] <= 8 * adapters


def test_adapters_of_a_model_that_is_too_large_to_train_fit_one_gpu() -> None:
    """8.03e9 parameters take 16 bytes each if they are trained, 2 if they are frozen."""
    model, gpu = AutoConfig.from_pretrained(FOLDER / "meta-llama/Llama-3.1-8B"), 80 * 2**30
    assert plan_of(model).certain > gpu
    adapted = plan_of(model, peft={"enabled": True, "dim": 32}, activation_checkpointing=True)
    assert 2 * 8.03e9 < adapted.certain < adapted.peak < gpu / 2


def test_stages_divide_the_layers_as_configured() -> None:
    def stages(total: int, count: int, **ends: int) -> list[range]:
        return stage_layers(total, count, MegatronConfig.build(**ends))

    assert stages(8, 2) == [range(4), range(4, 8)] and stages(3, 1) == [range(3)]
    first = {"num_layers_in_first_pipeline_stage": 3}
    assert stages(61, 16, **first, num_layers_in_last_pipeline_stage=2)[-2:] == [range(55, 59), range(59, 61)]
    assert stages(7, 3, **first) == [range(3), range(3, 5), range(5, 7)]
    tied = model_config(tie_word_embeddings=True)
    assert plan_of(tied, pp=2).certain > plan_of(tied).certain / 2  # both stages have the embedding


def test_a_run_logs_its_predicted_memory(tmp_path) -> None:
    model_config().save_pretrained(tmp_path)
    policy = PolicyConfig.build(
        model_name=str(tmp_path),
        generation=None,
        dtensor_cfg={"enabled": False},
        megatron_cfg={"enabled": True, "distributed_data_parallel_config": SHORT_GRADIENTS},
    )
    plan = MegatronTraining().predict_memory(policy, 2, trains=True, keeps_reference=False, on_gpu=True)
    assert plan is not None and {"weights", "gradients", "optimizer state"} == plan.stays.keys()
    assert "float32 gradients" in plan.table("x")
