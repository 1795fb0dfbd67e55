"""Files and sizes of a draft model."""

import json

import pytest
from policy_helpers import policy_config, save_tiny_model, tiny_model

from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.capacity.memory import Work
from nemo_rl.models.draft.choice import check_draft
from nemo_rl.models.draft.head import DraftHead
from nemo_rl.models.draft.shape import DraftShape
from nemo_rl.models.dtensor.mesh_check import DTensorRank
from nemo_rl.utils.errors import ConfigError

MODEL = tiny_model("qwen3", num_hidden_layers=8).config


def test_a_shape_is_read_back_from_its_configuration() -> None:
    shape = DraftShape.for_model(MODEL, num_layers=2, tapped_layers=(1, 5))
    assert DraftShape.read(shape.config(), "some/head", MODEL) == shape


@pytest.mark.parametrize("num_layers", [1, 3])
def test_parameters_are_counted(num_layers: int) -> None:
    shape = DraftShape.for_model(MODEL, num_layers, (0, 4))
    assert shape.num_parameters == sum(parameter.numel() for parameter in DraftHead(shape).parameters())


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_prediction_of_memory_counts_the_draft_model(ranks: int, tmp_path) -> None:
    name = save_tiny_model(tmp_path, "qwen2")
    kinds = [
        DTensorRank.predict(
            policy_config(name, draft={"enabled": enabled}), ParallelLayout(dp_shard=ranks), MODEL, Work(32)
        ).stays
        for enabled in (False, True)
    ]
    count = DraftShape.for_model(tiny_model("qwen2").config).num_parameters
    assert kinds[1] == kinds[0] | {"draft model": 16 * count / ranks}


def test_a_new_draft_model_reads_what_vllm_reads_by_default() -> None:
    assert DraftShape.for_model(MODEL).tapped_layers == (2, 4, 5)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"architectures": ["EagleLlamaForCausalLM"]}, ["EagleLlamaForCausalLM", "Only EAGLE-3 heads"]),
        ({"norm_before_fc": True}, ["norm_before_fc", "leave model_name out"]),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ["use_aux_hidden_state=false"]),
    ],
)
def test_other_kinds_of_draft_models_are_refused(values, words) -> None:
    published = DraftShape.for_model(MODEL).config() | values
    with pytest.raises(ConfigError) as caught:
        DraftShape.read(published, "some/head", MODEL)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"draft": {"aux_layer_indices": [1, 3]}}, ["aux_layer_indices=[1, 3]", "from 0 to 2"]),
        ({"dtensor_cfg": {"context_parallel_size": 2}}, ["context_parallel_size=2"]),
        ({"reward_model_cfg": {"enabled": True}}, ["reward_model_cfg.enabled=true"]),
    ],
)
def test_what_cannot_be_trained_is_refused(values, words, tmp_path) -> None:
    drafts = {"draft": {"enabled": True} | values.pop("draft", {})}
    policy = policy_config(save_tiny_model(tmp_path, "qwen2"), **drafts, **values)
    found = "\n".join(check_draft(policy))
    assert all(word in found for word in words), found


def test_a_head_for_another_model_is_refused(tmp_path) -> None:
    name = save_tiny_model(tmp_path / "model", "qwen2")
    head = tmp_path / "head"
    head.mkdir()
    values = DraftShape.for_model(tiny_model("qwen2").config).config() | {"target_hidden_size": 128, "vocab_size": 99}
    (head / "config.json").write_text(json.dumps(values))
    policy = policy_config(name, draft={"enabled": True, "model_name": str(head)})
    found = "\n".join(check_draft(policy))
    assert "hidden_size=128" in found and "vocab_size=99" in found
