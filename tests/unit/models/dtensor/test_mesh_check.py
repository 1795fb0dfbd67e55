"""Bad meshes are refused before Ray starts, with the arithmetic and the nearest sizes that fit."""

from pathlib import Path
from typing import Any

import pytest
from architectures import _COMMON, SPECIAL
from parity.every_type import tiny_form
from parity.ranks import policy_config
from policy_helpers import save_tiny_model
from transformers import AutoConfig, PretrainedConfig

from nemo_rl.algorithms import start
from nemo_rl.algorithms.setup import preflight
from nemo_rl.algorithms.setup.open_policy import open_policy
from nemo_rl.config import (
    REPOSITORY_ROOT,
    DistillationMasterConfig,
    GRPOMasterConfig,
    MasterConfig,
    PolicyConfig,
    load_config,
    model_ranks,
)
from nemo_rl.config.loading.algorithms import ALGORITHMS, algorithm_of
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.launch.command_line import launch
from nemo_rl.models.dtensor.mesh_check import check_mesh
from nemo_rl.models.dtensor.training_backend import DTensorTraining
from nemo_rl.utils.errors import ConfigError

EXAMPLES = REPOSITORY_ROOT / "examples/configs"
TINY = str(REPOSITORY_ROOT / "examples/assets/tiny-chat")
SHORT = {
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_parallel_size",
    "ep": "expert_parallel_size",
    "virtual": "virtual_pipeline_size",
    "method": "context_parallel_method",
    "sp": "sequence_parallel",
    "replicate": "dp_replicate_size",
    "coefficient": "moe_aux_loss_coeff",
}


def model_config(model_type: str, **fields: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **_COMMON | {"vocab_size": 96} | SPECIAL.get(model_type, {}) | fields)


def findings(
    model: PretrainedConfig, ranks: int, *, length: int = 64, section: str = "policy", policy: Any = None, **sizes: Any
) -> list[str]:
    keys = {SHORT[name]: value for name, value in sizes.items()}
    config = PolicyConfig.build(
        model_name="m", max_total_sequence_length=length, dtensor_cfg=keys, generation=None, **(policy or {})
    )
    return list(check_mesh(config, ParallelLayout.of(config, ranks), model, section))


QWEN = {"model_type": "qwen2"}  # 4 heads, 2 of keys and values, 96 columns, 96 tokens, 2 layers
MOE = {"model_type": "qwen3_moe"}  # the same with 4 experts and no dense layer

NO_AUXILIARY_LOSS = (
    "the auxiliary loss of experts (coefficient {}) is over the layers of all stages together, which "
    "{}.dtensor_cfg.pipeline_parallel_size=2 takes apart. Set {}.dtensor_cfg.moe_aux_loss_coeff=0."
)
WRONG: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (
        MOE | {"output_router_logits": True, "router_aux_loss_coef": 0.02},
        {"ranks": 2, "pp": 2},
        [NO_AUXILIARY_LOSS.format("0.02", "policy", "policy")],
    ),
    (
        MOE | {"output_router_logits": True, "router_aux_loss_coef": 0.02},
        {"ranks": 2, "pp": 2, "section": "value"},
        [NO_AUXILIARY_LOSS.format("0.02", "value", "value")],
    ),
    (MOE, {"ranks": 2, "pp": 2, "coefficient": 0.001}, [NO_AUXILIARY_LOSS.format("0.001", "policy", "policy")]),
    (
        QWEN,
        {"ranks": 3, "tp": 3},
        [
            "policy.dtensor_cfg.tensor_parallel_size=3 does not divide the 4 attention heads (num_attention_heads) of "
            "qwen2: 4 / 3 = 1.33333. Nearest sizes that fit the model and 3 ranks: 1.",
            "policy.dtensor_cfg.tensor_parallel_size=3 does not divide the 2 heads of keys and values "
            "(num_key_value_heads) of qwen2: 2 / 3 = 0.666667. Nearest sizes that fit the model and 3 ranks: 1.",
        ],
    ),
    (
        QWEN,
        {"ranks": 8, "tp": 4, "section": "teacher"},
        [
            "teacher.dtensor_cfg.tensor_parallel_size=4 does not divide the 2 heads of keys and values "
            "(num_key_value_heads) of qwen2: 2 / 4 = 0.5. Nearest sizes that fit the model and 8 ranks: 1, 2.",
        ],
    ),
    (
        QWEN | {"intermediate_size": 97, "vocab_size": 99},
        {"ranks": 2, "tp": 2},
        [
            "policy.dtensor_cfg.tensor_parallel_size=2 does not divide the 97 columns of the dense layers "
            "(intermediate_size) of qwen2: 97 / 2 = 48.5. Nearest sizes that fit the model and 2 ranks: 1.",
            "policy.dtensor_cfg.tensor_parallel_size=2 does not divide the 99 tokens of the vocabulary (vocab_size) of "
            "qwen2: 99 / 2 = 49.5. Nearest sizes that fit the model and 2 ranks: 1.",
        ],
    ),
    (
        MOE | {"num_experts": 5, "intermediate_size": 97},
        {"ranks": 2, "tp": 2},
        [
            "policy.dtensor_cfg.tensor_parallel_size=2 does not divide the 5 experts of a layer (num_local_experts) of "
            "qwen3_moe: 5 / 2 = 2.5. Nearest sizes that fit the model and 2 ranks: 1.",
        ],
    ),
    (
        {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 47},
        {"ranks": 4, "tp": 2, "ep": 4},
        [
            "policy.dtensor_cfg.tensor_parallel_size=2 does not divide the 47 columns of the shared expert "
            "(shared_expert_intermediate_size) of qwen2_moe: 47 / 2 = 23.5. Nearest sizes that fit the model and 4 "
            "ranks: 1.",
        ],
    ),
    (
        {"model_type": "deepseek_v3", "moe_intermediate_size": 47, "intermediate_size": 97},
        {"ranks": 2, "tp": 2},
        [
            "policy.dtensor_cfg.tensor_parallel_size=2 does not divide the 97 columns of the dense layers "
            "(intermediate_size) of deepseek_v3: 97 / 2 = 48.5. Nearest sizes that fit the model and 2 ranks: 1.",
            "policy.dtensor_cfg.tensor_parallel_size=2 does not divide the 47 columns of the shared experts "
            "(n_shared_experts x moe_intermediate_size) of deepseek_v3: 47 / 2 = 23.5. Nearest sizes that fit the "
            "model and 2 ranks: 1.",
        ],
    ),
    (
        MOE | {"num_experts": 12},
        {"ranks": 8, "ep": 8},
        [
            "policy.dtensor_cfg.expert_parallel_size=8 does not divide the 12 experts of a layer (num_local_experts) "
            "of qwen3_moe: 12 / 8 = 1.5. Nearest sizes that fit the model and 8 ranks: 2, 4.",
        ],
    ),
    (
        QWEN,
        {"ranks": 2, "ep": 2},
        [
            "policy.dtensor_cfg.expert_parallel_size=2, but qwen2 has no experts. Set "
            "policy.dtensor_cfg.expert_parallel_size=1.",
        ],
    ),
    (
        QWEN,
        {"ranks": 6, "cp": 3, "method": "ulysses", "tp": 2},
        [
            "policy.dtensor_cfg.context_parallel_size=3 with context_parallel_method=ulysses does not divide the 2 "
            "attention heads of a rank (4 / tensor_parallel_size=2): 2 / 3 = 0.666667. Nearest sizes that fit the "
            "model and 6 ranks: 1. context_parallel_method=all_gather takes any number of heads.",
        ],
    ),
    (
        QWEN,
        {"ranks": 4, "cp": 4, "length": 6},
        [
            "policy.dtensor_cfg.context_parallel_size=4 cuts a row into 8 parts (2 x 4), more than its 6 tokens "
            "(max_total_sequence_length=6). Use rows of at least 8 tokens, or a smaller size.",
        ],
    ),
    (
        QWEN | {"num_key_value_heads": 4},
        {"ranks": 8, "cp": 2, "tp": 4, "sp": True, "length": 6},
        [
            "policy.dtensor_cfg.context_parallel_size=2 cuts a row into 8 parts (2 x 2, and tensor_parallel_size=4 "
            "divides each rank's), more than its 6 tokens (max_total_sequence_length=6). Use rows of at least 8 "
            "tokens, or a smaller size.",
        ],
    ),
    ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, {"ranks": 2, "cp": 2}, []),
    ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, {"ranks": 2, "cp": 2}, []),
    (
        {"model_type": "llama4_text"},
        {"ranks": 2, "cp": 2},
        [
            "policy.dtensor_cfg.context_parallel_size=2, but llama4_text has layers that need the tokens before theirs "
            "in one piece: chunked_attention. Only softmax attention, with or without a window, can be divided. Set "
            "policy.dtensor_cfg.context_parallel_size=1.",
        ],
    ),
    (
        QWEN,
        {"ranks": 8, "pp": 4},
        [
            "policy.dtensor_cfg.pipeline_parallel_size=4 makes 4 chunks of layers, and qwen2 has 2 layers "
            "(num_hidden_layers). Nearest sizes that fit the model and 8 ranks: 1, 2.",
        ],
    ),
    (
        QWEN | {"num_hidden_layers": 6},
        {"ranks": 2, "pp": 2, "virtual": 4},
        [
            "policy.dtensor_cfg.pipeline_parallel_size=2 x virtual_pipeline_size=4 makes 8 chunks of layers, and qwen2 "
            "has 6 layers (num_hidden_layers). Nearest sizes that fit the model and 2 ranks: 1. Or "
            "virtual_pipeline_size=3.",
        ],
    ),
    (
        QWEN | {"vocab_size": 99},
        {"ranks": 8, "tp": 2, "pp": 4, "cp": 1, "ep": 2},
        [
            "policy.dtensor_cfg.tensor_parallel_size=2 does not divide the 99 tokens of the vocabulary (vocab_size) of "
            "qwen2: 99 / 2 = 49.5. Nearest sizes that fit the model and 8 ranks: 1.",
            "policy.dtensor_cfg.expert_parallel_size=2, but qwen2 has no experts. Set "
            "policy.dtensor_cfg.expert_parallel_size=1.",
            "policy.dtensor_cfg.pipeline_parallel_size=4 makes 4 chunks of layers, and qwen2 has 2 layers "
            "(num_hidden_layers). Nearest sizes that fit the model and 8 ranks: 1, 2.",
        ],
    ),
]


@pytest.mark.parametrize(("model", "mesh", "want"), WRONG)
def test_each_bad_mesh_gives_its_findings(model: dict[str, Any], mesh: dict[str, Any], want: list[str]) -> None:
    assert findings(model_config(**model), **mesh) == want


@pytest.mark.parametrize(
    ("model_type", "mesh"),
    [
        ("qwen2", {"ranks": 1}),
        ("qwen3", {"ranks": 16, "tp": 2, "cp": 2, "pp": 2, "replicate": 2, "sp": True}),
        ("gemma3_text", {"ranks": 4, "cp": 4, "method": "ulysses"}),
        ("qwen3_moe", {"ranks": 8, "tp": 2, "cp": 2, "ep": 4}),
        ("gpt_oss", {"ranks": 4, "tp": 2, "ep": 4}),
        ("deepseek_v3", {"ranks": 4, "tp": 2}),
        ("mixtral", {"ranks": 2, "tp": 2, "pp": 1}),
        ("llama", {"ranks": 2, "pp": 2}),
        ("gptj", {"ranks": 2, "tp": 2}),
        ("minimax", {"ranks": 2, "tp": 2}),
    ],
)
def test_good_meshes_give_no_findings(model_type: str, mesh: dict[str, Any]) -> None:
    assert findings(model_config(model_type), **mesh) == []


def test_a_scorer_has_no_vocabulary_to_divide() -> None:
    model = model_config("qwen2", vocab_size=99)
    assert len(findings(model, 2, tp=2)) == 1
    assert findings(model, 2, tp=2, policy={"reward_model_cfg": {"enabled": True}}) == []


def test_a_model_without_a_plan_is_a_finding_where_one_is_needed() -> None:
    def plan_for(model: PretrainedConfig) -> None:
        raise ConfigError(f"no plan for {model.model_type}")

    for ranks, want in ((1, []), (2, ["no plan for qwen2"])):
        config = PolicyConfig.build(model_name="m", dtensor_cfg={"tensor_parallel_size": ranks}, generation=None)
        layout = ParallelLayout.of(config, ranks)
        assert list(check_mesh(config, layout, model_config("qwen2"), plan_for=plan_for)) == want


def test_bad_numbers_of_ranks_name_the_keys() -> None:
    def error(ranks: int, **sizes: int) -> str:
        keys = {SHORT[name]: value for name, value in sizes.items()}
        with pytest.raises(ConfigError) as caught:
            ParallelLayout.of(PolicyConfig.build(model_name="m", dtensor_cfg=keys), ranks)
        return str(caught.value)

    assert error(8, tp=3, pp=2) == (
        "8 ranks are no multiple of 6 (pipeline_parallel_size=2 x tensor_parallel_size=3). Nearest numbers of ranks: "
        "6, 12. Or, for 8: tensor_parallel_size=2."
    )
    assert error(16, pp=2, tp=2, ep=3) == (
        "expert_parallel_size=3 does not divide the 8 ranks that share a copy of a stage: 8 / 3 = 2.66667 (16 ranks / "
        "pipeline_parallel_size=2). Nearest values: 2, 4."
    )


@pytest.mark.parametrize(
    "path",
    sorted(
        path for path in EXAMPLES.glob("*.yaml") if "megatron" not in path.stem and not path.stem.startswith("serve")
    ),
    ids=lambda path: path.stem,
)
def test_examples_fit_their_meshes(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model stands for models on the hub; it has other sizes, which are easier to divide."""
    schema = ALGORITHMS[algorithm_of(path)]
    if not issubclass(schema, MasterConfig):
        pytest.skip("nothing is trained")
    monkeypatch.chdir(tmp_path)
    config = load_config(path, schema=schema)
    for role in config.models.values():
        role.section.model_name = TINY
    preflight.check_backends(config.models, config.cluster)


@pytest.mark.parametrize("key", ["tensor_parallel_size=8", "context_parallel_size=8"])
def test_the_command_refuses_a_bad_mesh_before_ray_starts(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "init_ray", lambda *_: pytest.fail("Ray was started"))
    overrides = ["cluster.ranks_per_node=8", f"policy.dtensor_cfg.{key}", "policy.max_total_sequence_length=8"]
    overrides += ["policy.generation.max_new_tokens=8", "policy.generation.vllm_cfg.max_model_len=8"]
    ran: list[Any] = []
    assert launch("", EXAMPLES / "grpo_math_cpu.yaml", GRPOMasterConfig, ran.append, overrides) == 2
    assert f"policy.dtensor_cfg.{key} " in capsys.readouterr().err and not ran


def test_the_mesh_of_the_teacher_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    teacher = save_tiny_model(tmp_path / "teacher", "qwen2", vocab_size=96)
    overrides = [
        f"teacher.model_name={teacher}", f"teacher.tokenizer.name={TINY}", "teacher.colocated.enabled=false",
        "teacher.colocated.resources.ranks_per_node=4", "teacher.dtensor_cfg.tensor_parallel_size=4",
    ]  # fmt: skip
    config = load_config(EXAMPLES / "distillation_math_cpu.yaml", overrides, schema=DistillationMasterConfig)
    policy_ranks = config.cluster.policy_ranks_per_node
    assert model_ranks(config.cluster, config.models) == {"policy": policy_ranks, "teacher": 4}
    config.teacher.colocated.enabled = True
    assert model_ranks(config.cluster, config.models) == {"policy": policy_ranks, "teacher": policy_ranks}
    config.teacher.colocated.enabled = False
    with pytest.raises(ConfigError, match=r"^teacher\.dtensor_cfg\.tensor_parallel_size=4 does not divide the 2 heads"):
        preflight.check_backends(config.models, config.cluster)


def test_a_separate_teacher_leaves_the_other_devices_to_the_policy() -> None:
    overrides = [
        "cluster.device=cuda", "cluster.gpus_per_node=8", "teacher.colocated.enabled=false",
        "teacher.colocated.resources.gpus_per_node=4",
    ]  # fmt: skip
    config = load_config(EXAMPLES / "distillation_math.yaml", overrides, schema=DistillationMasterConfig)
    assert model_ranks(config.cluster, config.models) == {"policy": 4, "teacher": 4}


def test_a_notebook_gets_the_finding_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_rl.algorithms.setup.open_policy.init_ray", lambda *_: pytest.fail("Ray was started"))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=16 does not divide"):
        open_policy(TINY, ranks=16, learning_rate=1e-5, dtensor_cfg={"tensor_parallel_size": 16})


def test_findings_about_a_teacher_name_its_section() -> None:
    policy = PolicyConfig.build(model_name=TINY, dtensor_cfg={"tensor_parallel_size": 3}, generation=None)
    with pytest.raises(ConfigError, match=r"^teacher\.dtensor_cfg: 4 ranks are no multiple of 3"):
        DTensorTraining().check(policy, 4, "teacher")


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, {"pp": 2}),
        ({"router_aux_loss_coef": 0.02}, {"pp": 2}),
        ({"output_router_logits": True}, {"pp": 2, "coefficient": 0.0}),
        ({"output_router_logits": True}, {"pp": 1}),
        ({"output_router_logits": True}, {"pp": 2, "section": "teacher"}),
    ],
)
def test_pipelines_without_an_auxiliary_loss_are_accepted(fields: dict[str, Any], sizes: dict[str, Any]) -> None:
    assert findings(model_config("qwen3_moe", **fields), 2, **sizes) == []


@pytest.mark.parametrize(
    ("model_type", "fields", "advice"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=false"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention=null"),
        ("llama", {"is_causal": False}, "is_causal=true"),
    ],
)
def test_models_whose_tokens_see_later_ones_are_refused(model_type, fields, advice) -> None:
    (told,) = findings(model_config(model_type, **fields), 1)
    assert f"attend to later tokens ({next(iter(fields))}=" in told and f"policy.hf_config_overrides.{advice}" in told
    assert not findings(model_config("gemma4_text", use_bidirectional_attention="vision"), 1)


def test_a_weight_that_ranks_cannot_divide_is_named_for_any_type(tmp_path) -> None:
    """Which layers are dense, and how wide, each type says in its own fields; the weights themselves are checked."""
    tiny_form("ernie4_5_moe", named="odd dense width")[1].save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.gate_proj\.weight has 95 .* divides them: 1\."):
        DTensorTraining().check_sizes(policy_config(str(tmp_path), {"tensor_parallel_size": 2}, packed=False), 2)


def test_experts_are_found_where_kinds_of_layers_tell_mixers_only() -> None:
    jamba = {"mamba_d_state": 8, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
    assert not findings(model_config("jamba", **jamba), 2, ep=2)
    (told,) = findings(model_config("jamba", **jamba | {"num_experts": 1}), 2, ep=2)
    assert "jamba has no experts" in told
