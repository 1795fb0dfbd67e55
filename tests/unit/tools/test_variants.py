"""Variants of model types have other sizes, are the same in every process, and are right or refused."""

import pytest
import torch
from mesh_sweep import GOOD, sweep
from parity import every_type, families, variants
from parity.every_type import tiny_form
from transformers import CONFIG_MAPPING

SOME = ["llama", "qwen3_moe", "gemma3_text", "qwen3_next", "lfm2"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.set_num_threads(1)


@pytest.mark.parametrize("model_type", SOME)
def test_a_seed_gives_the_same_unusual_sizes(model_type) -> None:
    usual, (model, config) = tiny_form(model_type)[1], tiny_form(model_type, 1)
    assert config.to_dict() == tiny_form(model_type, 1)[1].to_dict()
    assert config.to_dict() != tiny_form(model_type, 2)[1].to_dict()
    assert (config.vocab_size, config.num_hidden_layers) == (131, 5)
    assert config.num_key_value_heads in (1, 3)
    assert (usual.vocab_size, usual.num_hidden_layers) == (128, 4)
    assert len(list(model.parameters())) > 20


@pytest.mark.parametrize("model_type", families.FAMILIES)
def test_named_options_are_those_of_the_configuration(model_type) -> None:
    usual = tiny_form(model_type)[1].to_dict()
    for name, fields in families.FAMILIES[model_type].items():
        config = every_type._small(CONFIG_MAPPING[model_type], every_type._SIZES, model_type, None, fields)
        given = {field: value for field, value in fields.items() if field != "rope_parameters"}
        found = {field: getattr(config, field) for field in given}
        assert {k: [*v] if isinstance(v, tuple) else v for k, v in found.items()} == given, name
        assert config.to_dict() != usual, name
    with pytest.raises(ValueError, match="has no variant 'x', but "):
        families.fields_of(model_type, "x")


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ValueError, match=r"MistralConfig has no \['slidingwindow'\]"):
        every_type._small(CONFIG_MAPPING["mistral"], every_type._SIZES, "mistral", None, {"slidingwindow": 4})


def test_each_kind_of_layer_stays() -> None:
    for seed in range(8):
        kinds = variants.retiled({"layer_types": ["a", "b", "a", "b"], "other": 4}, seed, "x")
        assert {*kinds["layer_types"]} == {"a", "b"}
        assert len(kinds["layer_types"]) == variants.layers(seed)
        assert kinds["other"] == 4


@pytest.mark.parametrize(
    ("model_type", "seed", "mesh"), [("llama", 2, "tp2"), ("gemma3_text", 1, "cp2"), ("lfm2", 1, "1")]
)
def test_variants_are_right_or_refused(model_type, seed, mesh) -> None:
    (cell,) = sweep(model_type, [mesh], packed=True, seed=seed)
    assert cell.result in GOOD, cell
