"""Meshes that Megatron Core cannot train are refused before Ray starts, with the arithmetic and the nearest choice."""

import importlib.metadata
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from architectures import _COMMON, SPECIAL
from transformers import AutoConfig, PretrainedConfig

from nemo_rl.algorithms.setup import preflight
from nemo_rl.config import REPOSITORY_ROOT, ClusterConfig, PolicyConfig, model_ranks, row_length_multiple
from nemo_rl.config.loading.algorithms import ALGORITHMS, algorithm_of
from nemo_rl.config.loading.load import load_config
from nemo_rl.config.rules.megatron import check_megatron, check_offloading
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.capacity.hub_configs import FOLDER, known_models
from nemo_rl.models.dtensor.training_backend import DTensorTraining
from nemo_rl.models.megatron.mesh_check import check_mesh
from nemo_rl.models.megatron.release import TESTED_VERSION, require_megatron_core
from nemo_rl.models.megatron.training_backend import MegatronTraining
from nemo_rl.models.training.backends import backend_of_checkpoint, training_backend
from nemo_rl.utils.errors import ConfigError

TINY = str(REPOSITORY_ROOT / "examples/assets/tiny-chat")
EXAMPLES = sorted((REPOSITORY_ROOT / "examples/configs").glob("*megatron*.yaml"))
SHORT = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "virtual": "virtual_pipeline_model_parallel_size",
    "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
    "sp": "sequence_parallel",
    "dispatcher": "moe_token_dispatcher_type",
}


def model_config(model_type: str, **fields: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **_COMMON | {"vocab_size": 96} | SPECIAL.get(model_type, {}) | fields)


def policy_of(length: int = 64, **sizes: Any) -> PolicyConfig:
    keys = {SHORT[name]: value for name, value in sizes.items()}
    return PolicyConfig.build(
        model_name="m",
        max_total_sequence_length=length,
        dtensor_cfg={"enabled": False},
        megatron_cfg={"enabled": True, **keys},
        generation=None,
    )


def findings(model: PretrainedConfig, ranks: int, section: str = "policy", **sizes: Any) -> list[str]:
    policy = policy_of(**sizes)
    found = check_mesh(policy, ParallelLayout.of(policy, ranks), model, section)
    return [text.replace(f"{section}.megatron_cfg", "M") for text in found]


QWEN = {"model_type": "qwen2"}  # 4 heads, 2 query groups, 96 columns, 96 tokens, 2 layers
MOE = {"model_type": "qwen3_moe"}  # the same with 4 experts of 48 columns
HYBRID = {
    "model_type": "nemotron_h",
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
    "mamba_num_heads": 6,
    "n_groups": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 40,
}
DELTA = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
}

WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "heads, query groups": (
        QWEN,
        {"ranks": 8, "tp": 8},
        [
            "M.tensor_model_parallel_size=8 does not divide the 4 attention heads (num_attention_heads) of qwen2: "
            "4 / 8 = 0.5. Nearest sizes that fit the model and 8 ranks: 1, 2.",
            "M.tensor_model_parallel_size=8 does not divide the 2 heads of keys and values (num_key_value_heads) of "
            "qwen2: 2 / 8 = 0.25. Nearest sizes that fit the model and 8 ranks: 1, 2.",
        ],
    ),
    "vocabulary, also of a model without one": (
        QWEN | {"vocab_size": 97},
        {"ranks": 2, "tp": 2},
        [
            "M.tensor_model_parallel_size=2 does not divide the 97 tokens of the vocabulary (vocab_size) of qwen2: "
            "97 / 2 = 48.5. Nearest sizes that fit the model and 2 ranks: 1.",
        ],
    ),
    "experts": (
        MOE,
        {"ranks": 3, "ep": 3},
        [
            "M.expert_model_parallel_size=3 does not divide the 4 experts of a layer (num_local_experts) of qwen3_moe: "
            "4 / 3 = 1.33333. Nearest sizes that fit the model and 3 ranks: 1.",
        ],
    ),
    "no experts": (
        QWEN,
        {"ranks": 4, "ep": 2, "etp": 2},
        [
            "M.expert_model_parallel_size=2, but qwen2 has no experts. Set M.expert_model_parallel_size=1.",
            "M.expert_tensor_parallel_size=2, but qwen2 has no experts. Set M.expert_tensor_parallel_size=1.",
        ],
    ),
    "parts of an expert": (
        MOE | {"moe_intermediate_size": 47},
        {"ranks": 2, "etp": 2},
        [
            "M.expert_tensor_parallel_size=2 does not divide the 47 columns of an expert (moe_intermediate_size) of "
            "qwen3_moe: 47 / 2 = 23.5. Nearest sizes that fit the model and 2 ranks: 1.",
        ],
    ),
    "heads and groups of Mamba-2 layers": (
        HYBRID,
        {"ranks": 8, "tp": 2, "sp": True, "cp": 4},
        [
            "M.tensor_model_parallel_size=2 does not divide the 3 groups of heads of the Mamba-2 layers (n_groups) of "
            "nemotron_h: 3 / 2 = 1.5. Nearest sizes that fit the model and 8 ranks: 1.",
            "M.context_parallel_size=4 does not divide the 3 heads of each of the 2 tensor-parallel ranks in Mamba-2 "
            "layers (mamba_num_heads) of nemotron_h: 3 / 4 = 0.75. Nearest sizes that fit the model and 8 ranks: 1.",
        ],
    ),
    "heads of keys of gated delta nets": (
        DELTA,
        {"ranks": 4, "tp": 2, "cp": 2},
        [
            "M.tensor_model_parallel_size=2 does not divide the 3 heads of keys of the gated delta nets "
            "(linear_num_key_heads) of qwen3_5_text: 3 / 2 = 1.5. Nearest sizes that fit the model and 4 ranks: 1.",
        ],
    ),
    "heads of keys of gated delta nets, by context-parallel ranks": (
        DELTA | {"linear_num_key_heads": 2},
        {"ranks": 4, "tp": 2, "cp": 2},
        [
            "M.context_parallel_size=2 does not divide the 1 heads of keys of each of the 2 tensor-parallel ranks in "
            "gated delta nets (linear_num_key_heads) of qwen3_5_text: 1 / 2 = 0.5. Nearest sizes that fit the model "
            "and 4 ranks: 1.",
        ],
    ),
    "experts without sequence parallelism": (
        MOE,
        {"ranks": 2, "tp": 2},
        [
            "M.tensor_model_parallel_size=2 trains the experts of qwen3_moe only with sequence parallelism. Set "
            "M.sequence_parallel=true.",
        ],
    ),
    "sequence parallelism alone": (
        QWEN,
        {"ranks": 2, "sp": True},
        [
            "M.sequence_parallel=true divides sequences among the ranks of tensor_model_parallel_size=1. Set it to "
            "false, or M.tensor_model_parallel_size to at least 2.",
        ],
    ),
    "short rows": (
        QWEN,
        {"ranks": 4, "cp": 2, "tp": 2, "sp": True, "length": 3},
        [
            "M.context_parallel_size=2 cuts a row into 4 parts (2 x 2, and tensor_model_parallel_size=2 divides each "
            "rank's), more than its 3 tokens (max_total_sequence_length=3). Use rows of at least 4 tokens, or a "
            "smaller size.",
        ],
    ),
    "tokens gathered from ranks with other rows, and by stages": (
        MOE,
        {"ranks": 4, "ep": 2, "pp": 2, "dispatcher": "allgather"},
        [
            "M.moe_token_dispatcher_type=allgather needs equally many tokens on all ranks that share experts. "
            "expert_model_parallel_size=2 with expert_tensor_parallel_size=1 takes 2 ranks, and only the 1 of tensor "
            "and context parallelism have the same rows. Use alltoall.",
            "M.moe_token_dispatcher_type=allgather knows no stages whose microbatches differ in length: "
            "pipeline_model_parallel_size=2. Use alltoall.",
        ],
    ),
    "layers by stages": (
        QWEN | {"num_hidden_layers": 61},
        {"ranks": 32, "pp": 16},
        [
            "M.pipeline_model_parallel_size=16 does not divide the 61 layers (num_hidden_layers) of qwen2: 61 / 16 "
            "stages = 3.8125. Nearest sizes that fit the model and 32 ranks: 1. Or "
            "num_layers_in_last_pipeline_stage=1 (4 on each other stage).",
        ],
    ),
    "layers by stages and chunks": (
        QWEN | {"num_hidden_layers": 6},
        {"ranks": 4, "pp": 2, "virtual": 2},
        [
            "M.pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2 does not divide the 6 layers "
            "(num_hidden_layers) of qwen2: 6 / 2 stages / 2 chunks = 1.5. Or num_layers_in_last_pipeline_stage=2 "
            "(4 on each other stage).",
        ],
    ),
    "layers of the ends": (
        QWEN | {"num_hidden_layers": 12},
        {"ranks": 4, "pp": 4, "first": 2, "last": 3},
        [
            "M.pipeline_model_parallel_size=4, num_layers_in_first_pipeline_stage=2, "
            "num_layers_in_last_pipeline_stage=3 does not divide the 12 layers (num_hidden_layers) of qwen2: "
            "(12 - 2 - 3) / 2 stages = 3.5. Leave num_layers_in_first_pipeline_stage and "
            "num_layers_in_last_pipeline_stage at null.",
        ],
    ),
    "more than there are": (
        QWEN | {"num_hidden_layers": 6},
        {"ranks": 2, "pp": 2, "first": 3, "last": 4},
        [
            "M.pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=3, "
            "num_layers_in_last_pipeline_stage=4 does not divide the 6 layers (num_hidden_layers) of qwen2: 6 - 3 - 4 "
            "= -1 layers for the 0 stages between. Leave num_layers_in_first_pipeline_stage and "
            "num_layers_in_last_pipeline_stage at null.",
        ],
    ),
    "no pipeline": (
        QWEN,
        {"ranks": 2, "virtual": 2},
        [
            "M.virtual_pipeline_model_parallel_size=2 divide the layers of a pipeline, and "
            "pipeline_model_parallel_size=1. Set it to null, or the pipeline to at least 2 stages.",
        ],
    ),
    "another family": (
        {"model_type": "gptj"},
        {"ranks": 2, "tp": 2},
        [
            "policy.model_name=m is a gptj, which M cannot train: there are deepseek_v3, gemma3_text, glm4_moe, "
            "glm4_moe_lite, gpt_oss, llama, minimax_m2, mistral, nemotron_h, qwen2, qwen3, qwen3_5_moe_text, "
            "qwen3_5_text, qwen3_moe, qwen3_next. Train it with policy.dtensor_cfg.enabled=true and M.enabled=false.",
        ],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_bad_mesh_gives_its_findings(name: str) -> None:
    model, mesh, want = WRONG[name]
    assert findings(model_config(**model), **mesh) == want


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        (QWEN, {"ranks": 1}),
        (QWEN, {"ranks": 16, "tp": 2, "cp": 2, "pp": 2, "sp": True}),
        (QWEN | {"num_hidden_layers": 8}, {"ranks": 2, "pp": 2, "virtual": 2}),
        (QWEN | {"num_hidden_layers": 61}, {"ranks": 16, "pp": 16, "first": 3, "last": 2}),
        (QWEN | {"num_hidden_layers": 5}, {"ranks": 2, "pp": 2, "first": 3}),
        (QWEN | {"num_hidden_layers": 10}, {"ranks": 3, "pp": 3, "virtual": 2, "last": 2}),
        (MOE, {"ranks": 8, "tp": 2, "sp": True, "cp": 2, "ep": 4, "etp": 2}),
        (DELTA | {"linear_num_key_heads": 4}, {"ranks": 4, "tp": 2, "cp": 2}),
        (MOE, {"ranks": 2, "tp": 2, "section": "teacher"}),
        (MOE, {"ranks": 4, "tp": 2, "sp": True, "ep": 2, "dispatcher": "allgather"}),
        (QWEN, {"ranks": 4, "pp": 2, "dispatcher": "allgather"}),
        ({"model_type": "gemma3_text"}, {"ranks": 2, "cp": 2}),
        ({"model_type": "gpt_oss"}, {"ranks": 4, "tp": 2, "sp": True, "ep": 4}),
        ({"model_type": "deepseek_v3"}, {"ranks": 4, "tp": 2, "sp": True, "ep": 2}),
        (HYBRID | {"n_groups": 2}, {"ranks": 4, "tp": 2, "sp": True, "pp": 2, "ep": 2}),
        (HYBRID, {"ranks": 3, "cp": 3}),
        (HYBRID | {"n_groups": 1}, {"ranks": 2, "cp": 2}),
        (HYBRID | {"layers_block_type": ["linear_attention", "mlp"], "n_groups": 2}, {"ranks": 2, "tp": 2}),
    ],
)
def test_good_meshes_give_no_findings(model: dict[str, Any], mesh: dict[str, Any]) -> None:
    assert findings(model_config(**model), **mesh) == []


def test_ranks_are_counted_from_the_keys_of_the_section() -> None:
    def error(ranks: int, **sizes: int) -> str:
        with pytest.raises(ConfigError) as caught:
            ParallelLayout.of(policy_of(**sizes), ranks)
        return str(caught.value)

    assert ParallelLayout.of(policy_of(tp=2, pp=2, cp=2, ep=4), 16) == ParallelLayout(
        pp=2, dp_shard=2, cp=2, tp=2, ep=4
    )
    assert error(8, tp=3, pp=2) == (
        "8 ranks are no multiple of 6 (pipeline_model_parallel_size=2 x tensor_model_parallel_size=3). Nearest numbers "
        "of ranks: 6, 12. Or, for 8: tensor_model_parallel_size=2."
    )
    assert error(16, pp=2, ep=4, etp=4) == (
        "expert_model_parallel_size=4 x expert_tensor_parallel_size=4 does not divide the 8 ranks that share a copy of "
        "a stage: 8 / 16 = 0.5 (16 ranks / pipeline_model_parallel_size=2). Nearest values of "
        "expert_model_parallel_size: 1, 2."
    )
    assert error(4, etp=8).endswith("(4 ranks). Lower expert_tensor_parallel_size.")


@pytest.mark.parametrize(
    ("sizes", "want"),
    [({}, 1), ({"tp": 4}, 1), ({"tp": 4, "sp": True}, 4), ({"cp": 2}, 4), ({"cp": 2, "tp": 4, "sp": True}, 8)],
)
def test_rows_divide_among_the_ranks_that_share_them(sizes: dict[str, Any], want: int) -> None:
    assert row_length_multiple(policy_of(**sizes)) == want


def test_the_section_chooses_the_backend(tmp_path: Path) -> None:
    assert isinstance(training_backend(policy_of()), MegatronTraining)
    for content, kind in (
        ("{megatron_cfg: {enabled: true}, dtensor_cfg: {enabled: false}}", MegatronTraining),
        ("{megatron_cfg: {enabled: false}, dtensor_cfg: {enabled: true}}", DTensorTraining),
        ("{model_name: m}", DTensorTraining),
    ):
        (tmp_path / "config.yaml").write_text(f"policy: {content}")
        assert isinstance(backend_of_checkpoint(tmp_path), kind)
    (tmp_path / "config.yaml").write_text("policy: {dtensor_cfg: {enabled: false}}")
    with pytest.raises(ConfigError, match=r"dtensor_cfg\.enabled=true or policy\.megatron_cfg\.enabled=true"):
        backend_of_checkpoint(tmp_path)


def test_ranks_that_split_layers_share_one_queue() -> None:
    backend = MegatronTraining()
    assert backend.environment(policy_of()) == backend.environment(policy_of(pp=2)) == {}
    for sizes in ({"tp": 2}, {"cp": 2}):
        assert backend.environment(policy_of(**sizes)) == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@pytest.mark.parametrize("given", [None, "0"])
def test_rings_of_context_parallel_ranks_batch_their_messages(monkeypatch, given: str | None) -> None:
    variable = "NVTE_BATCH_MHA_P2P_COMM"
    monkeypatch.setenv(variable, given or "")
    if given is None:
        monkeypatch.delenv(variable)
    assert MegatronTraining().environment(policy_of(cp=4))[variable] == (given or "1")


@pytest.mark.parametrize(("found", "words"), [(None, "is not installed"), ("0.18.0", "0.18.0 is installed")])
def test_another_megatron_core_is_refused(monkeypatch: pytest.MonkeyPatch, found: str | None, words: str) -> None:
    def version(name: str) -> str:
        assert name == "megatron-core"
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ConfigError, match=rf"(?s)megatron_cfg.*{words}.*--extra mcore") as caught:
        require_megatron_core("teacher.megatron_cfg.enabled=true")
    assert TESTED_VERSION in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "warned"),
    [
        ({"precision": "bfloat16"}, False),
        ({"precision": "bfloat16", "grad_reduce_in_fp32": False}, True),
        ({"precision": "bfloat16", "grad_reduce_in_fp32": False, "train_micro_batch_size": 4}, False),
        ({"precision": "float32", "grad_reduce_in_fp32": False}, False),
    ],
)
def test_long_bfloat16_sums_give_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keys: dict[str, Any], warned: bool
) -> None:
    keys = dict(keys)
    gradients = {"grad_reduce_in_fp32": keys.pop("grad_reduce_in_fp32", True)}
    model_config("qwen2").save_pretrained(tmp_path)
    policy = PolicyConfig.build(
        model_name=str(tmp_path),
        train_global_batch_size=32,
        dtensor_cfg={"enabled": False},
        megatron_cfg={"enabled": True, "distributed_data_parallel_config": gradients},
        **{"train_micro_batch_size": 1, **keys},
    )
    MegatronTraining().check(policy, 1)
    assert ("up to 32 microbatches" in caplog.text) is warned


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({}, []),
        ({"precision": "float32"}, ["policy.precision=float32"]),
        ({"optimizer": "sgd"}, ["optimizer.optimizer=sgd"]),
        ({"optimizer": "sgd", "use_distributed_optimizer": False}, ["=sgd", "use_distributed_optimizer=false"]),
    ],
)
def test_an_optimizer_in_host_memory_has_to_be_savable(values: dict[str, Any], wrong: list[str]) -> None:
    values = dict(values)
    precision = values.pop("precision", "bfloat16")
    optimizer = {"optimizer_cpu_offload": True} | values
    policy = PolicyConfig.build(
        model_name="m",
        precision=precision,
        dtensor_cfg={"enabled": False},
        megatron_cfg={"enabled": True, "optimizer": optimizer},
    )
    found = list(check_offloading("policy", policy, ClusterConfig.build(device="cuda")))
    assert len(found) == len(wrong)
    assert all(words in text for words, text in zip(wrong, found, strict=True))
    assert list(check_offloading("policy", policy, ClusterConfig.build(device="cpu"))) == []


def test_a_model_that_megatron_core_cannot_express_is_refused_before_ray(tmp_path: Path) -> None:
    model_config("qwen2", hidden_act="relu").save_pretrained(tmp_path)
    policy = policy_of().model_copy(update={"model_name": str(tmp_path)})
    with pytest.raises(ConfigError, match="hidden_act"):
        MegatronTraining().check(policy, 1)


def test_options_of_experts_are_refused_with_adapters_where_there_are_experts(tmp_path: Path) -> None:
    """A dense model has neither router biases nor shared experts, so nothing is refused."""

    def refused(model_type: str, **options: Any) -> str:
        model_config(model_type).save_pretrained(tmp_path)
        policy = policy_of()
        policy["megatron_cfg"] = {"enabled": True, "peft": {"enabled": True}, **options}
        policy["model_name"] = str(tmp_path)
        try:
            MegatronTraining().check(policy, 1)
        except ConfigError as error:
            return str(error)
        return ""

    rate, bias = {"moe_router_bias_update_rate": 1e-3}, {"moe_router_enable_expert_bias": True}
    for options in (rate, rate | bias, {"moe_shared_expert_overlap": True}):
        assert refused("qwen2", **options) == ""
    assert refused("qwen3_moe", **rate) == ""
    assert "moe_router_bias_update_rate=0.001 moves biases of routers" in refused("qwen3_moe", **rate, **bias)
    assert "moe_router_bias_update_rate=0.001 moves biases" in refused("deepseek_v3", **rate)
    assert "gives shared experts inputs" in refused("deepseek_v3", moe_shared_expert_overlap=True)


def test_the_folder_for_converted_models_gives_a_notice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    policy = PolicyConfig.build(model_name=TINY, dtensor_cfg={"enabled": False}, megatron_cfg={"enabled": True})
    with caplog.at_level("INFO"):
        MegatronTraining().check(policy, 1)
        assert "NRL_MEGATRON_CHECKPOINT_DIR" not in caplog.text
        monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", "/converted")
        MegatronTraining().check(policy, 1)
    assert "NRL_MEGATRON_CHECKPOINT_DIR has no effect" in caplog.text


def test_state_that_cannot_be_saved_is_refused() -> None:
    def found(**optimizer: Any) -> list[str]:
        section = {"enabled": True, "optimizer": {"optimizer": "sgd", **optimizer}}
        policy = PolicyConfig.build(
            model_name="m", dtensor_cfg={"enabled": False}, megatron_cfg=section, generation=None
        )
        return list(check_megatron("policy", policy.megatron_cfg))

    (text,) = found()
    assert text.startswith("policy.megatron_cfg.optimizer.sgd_momentum=0.9 with use_distributed_optimizer=true")
    assert found(sgd_momentum=0.0) == found(use_distributed_optimizer=False) == []


def test_muon_needs_whole_matrices() -> None:
    def found(**section: Any) -> list[str]:
        optimizer = {"optimizer": "dist_muon", **section.pop("optimizer", {})}
        policy = PolicyConfig.build(
            model_name="m",
            dtensor_cfg={"enabled": False},
            megatron_cfg={"enabled": True, "optimizer": optimizer, **section},
            generation=None,
        )
        return list(check_megatron("policy", policy.megatron_cfg))

    given = "policy.megatron_cfg.optimizer.optimizer=dist_muon with"
    divided, adapters = found(peft={"enabled": True})
    assert (
        divided.startswith(f"{given} use_distributed_optimizer=true") and "use_distributed_optimizer=false" in divided
    )
    assert adapters.startswith(f"{given} policy.megatron_cfg.peft.enabled=true") and "optimizer=adam" in adapters
    assert found(optimizer={"use_distributed_optimizer": False}) == []


def test_the_project_pins_the_tested_release() -> None:
    project = tomllib.loads((REPOSITORY_ROOT / "pyproject.toml").read_text())
    assert f"megatron-core=={TESTED_VERSION}" in project["project"]["optional-dependencies"]["mcore"]


def test_checks_do_not_import_megatron() -> None:
    code = (
        "import sys; from nemo_rl.models.megatron import mesh_check, training_backend;"
        "from nemo_rl.models.megatron.model import families, model_check;"
        "sys.exit(any(name.split('.')[0] == 'megatron' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-1.5B": {"model_type": "qwen2", "num_attention_heads": 12, "num_key_value_heads": 2},
    "Qwen/Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
        "num_hidden_layers": 48, "moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": 151936,
    },
    "deepseek-ai/DeepSeek-V3": {"model_type": "deepseek_v3"},
    "meta-llama/Llama-3.2-1B": {"model_type": "llama"},
    "meta-llama/Llama-3.2-1B-Instruct": {"model_type": "llama"},
}  # fmt: skip
"""Numbers of the models of the examples; those of DeepSeek-V3 are the defaults of its configuration."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_train_with_megatron_on_their_meshes(path: Path) -> None:
    config = load_config(path, schema=ALGORITHMS[algorithm_of(path)])
    policy = config.policy
    assert isinstance(training_backend(policy), MegatronTraining)
    assert policy.optimizer is None and policy.scheduler is None
    if policy.model_name.endswith("tiny-chat"):
        model = AutoConfig.from_pretrained(TINY)
    elif policy.model_name in known_models():
        model = AutoConfig.from_pretrained(FOLDER / policy.model_name)
    else:
        model = AutoConfig.for_model(**MODELS[policy.model_name])
    ranks = model_ranks(config.cluster, config.models)["policy"]
    assert list(check_mesh(policy, ParallelLayout.of(policy, ranks), model)) == []


def test_preflight_refuses_a_bad_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    example = next(path for path in EXAMPLES if path.stem == "grpo_math_cpu_megatron")
    overrides = ["cluster.ranks_per_node=8", "policy.megatron_cfg.tensor_model_parallel_size=8"]
    config = load_config(example, overrides)
    with pytest.raises(ConfigError, match=r"policy\.megatron_cfg\.tensor_model_parallel_size=8 does not divide the"):
        preflight.check_backends(config.models, config.cluster)
